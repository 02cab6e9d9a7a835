"""What is noted of a run, and what a worker that comes later takes over."""

from __future__ import annotations

from paceline.session.record.history import RunHistory


def test_what_is_told_is_noted_too() -> None:
    said: list[str] = []
    history = RunHistory(7, 0.0, said.append)
    history.note("one")
    history.tell("two")
    assert [event["what"] for event in history.events] == ["one", "two"] and said == ["two"]
    assert all(event["time"] > 0 for event in history.events)


def test_who_comes_later_goes_on_with_it() -> None:
    history, other = RunHistory(7, 5.0, print), RunHistory(8, 9.0, print)
    history.note("one")
    other.learn(history.facts())
    assert (other.seed, other.began, other.events) == (7, 5.0, history.events)
