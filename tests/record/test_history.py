"""What is noted of a run, and what a worker that comes later takes over."""

from __future__ import annotations

from paceline.record.history import MAX_SAVES, RunHistory


def test_what_is_told_is_noted_too() -> None:
    said: list[str] = []
    history = RunHistory(7, 0.0, said.append)
    history.note_event("one")
    history.announce_event("two")
    assert [event["what"] for event in history.events] == ["one", "two"] and said == ["two"]
    assert all(event["time"] > 0 for event in history.events)


def test_who_comes_later_goes_on_with_it() -> None:
    history, other = RunHistory(7, 5.0, print), RunHistory(8, 9.0, print)
    history.note_event("one")
    history.note_checkpoint("step-1", 1, background=False)
    other.adopt_facts(history.collect_facts())
    assert (other.seed, other.began, other.events) == (
        7,
        5.0,
        history.events,
    ) and other.saves == history.saves != []


def test_who_follows_is_told_of_each() -> None:
    told: list[tuple[int, int]] = []
    history = RunHistory(7, 0.0, print)
    history.add_follower(lambda: told.append((len(history.events), len(history.saves))))
    history.note_event("one")
    history.note_checkpoint("step-00000004", 4, background=False)
    history.note_checkpoint("step-00000005", 5, background=True)
    assert told == [(1, 0), (1, 1), (1, 2)]
    assert [(save["what"], save["step"]) for save in history.saves] == [
        ("saved step-00000004", 4),
        ("step-00000005 is being written", 5),
    ]
    assert all(save["time"] > 0 for save in history.saves)


def test_of_many_checkpoints_the_last_are_kept() -> None:
    history = RunHistory(7, 0.0, print)
    for step in range(MAX_SAVES + 3):
        history.note_checkpoint(f"step-{step}", step, background=False)
    assert [save["step"] for save in history.saves] == list(range(3, MAX_SAVES + 3))
