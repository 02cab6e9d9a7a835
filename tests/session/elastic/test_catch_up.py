"""A worker that was cut off in a call answers its loaders as the others had answered theirs, and then as things are now."""

from __future__ import annotations

from paceline.session.elastic.catch_up import CatchUp


def test_answers_are_counted_since_the_last_completed_call() -> None:
    calls = 3
    catch_up = CatchUp(lambda: calls)
    assert [catch_up.asked, catch_up.answer(0), catch_up.answer(0), catch_up.asked] == [0, 0, 0, 2]
    calls = 4
    assert catch_up.asked == 0
    catch_up.answer(1)
    assert catch_up.asked == 1


def test_who_is_behind_repeats_what_it_answered_last() -> None:
    calls = 3
    catch_up = CatchUp(lambda: calls)
    catch_up.answer(5)
    assert not catch_up.behind
    calls = 4  # its result was handed over
    catch_up.begin(2)
    answers = [catch_up.repeat() if catch_up.behind else catch_up.answer(6) for _ in range(3)]
    assert answers == [5, 5, 6] and catch_up.asked == 3, "as often as those who were ahead: another may be behind now"


def test_who_is_lost_before_it_has_caught_up_begins_anew() -> None:
    catch_up = CatchUp(lambda: 1, answer=1)
    catch_up.begin(7)
    assert catch_up.repeat() == 1
    catch_up.begin(0)
    assert not catch_up.behind
