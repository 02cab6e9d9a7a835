"""A worker that was cut off in a call answers its loaders as the others had answered theirs, and
then as things are now.
"""

from __future__ import annotations

from paceline.elastic.missed_turns import MissedTurns


def test_answers_are_counted_since_the_last_completed_call() -> None:
    calls = 3
    missed = MissedTurns(lambda: calls)
    assert [
        missed.answers_since_call,
        missed.record_answer(0),
        missed.record_answer(0),
        missed.answers_since_call,
    ] == [0, 0, 0, 2]
    calls = 4
    assert missed.answers_since_call == 0
    missed.record_answer(1)
    assert missed.answers_since_call == 1


def test_who_is_behind_repeats_what_it_answered_last() -> None:
    calls = 3
    missed = MissedTurns(lambda: calls)
    missed.record_answer(5)
    assert not missed.is_behind
    calls = 4  # its result was handed over
    missed.begin_repeating(2)
    answers = [
        missed.repeat_answer() if missed.is_behind else missed.record_answer(6) for _ in range(3)
    ]
    assert answers == [5, 5, 6] and missed.answers_since_call == 3, (
        "as often as those who were ahead: another may be behind now"
    )


def test_who_is_lost_before_it_has_caught_up_begins_anew() -> None:
    missed = MissedTurns(lambda: 1, answer=1)
    missed.begin_repeating(7)
    assert missed.repeat_answer() == 1
    missed.begin_repeating(0)
    assert not missed.is_behind
