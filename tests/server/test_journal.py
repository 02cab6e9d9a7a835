"""What a server remembers of its steps: samples that are in one, and how to make the step on another server."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import StateLost
from paceline.server import journal
from paceline.server.journal import StepJournal, merged
from paceline.server.protocol.message import Index
from paceline.server.protocol.parameters import CloseStep
from paceline.server.protocol.samples import CountedGradient


def close(step: int, *came: list[Any], optimizer: int = 0, of: tuple[int, int] = (0, 0)) -> CloseStep:
    gradients = tuple(CountedGradient(worker, number, tuple(map(tuple, pieces))) for worker, number, pieces in came)
    settings = ((0, {"lr": 0.1, "betas": [0.9, 0.99]}),)
    return CloseStep(Index(optimizer), step, 0, (0,), 1.0, settings, of=of, came=gradients)


def test_what_was_made_is_known_and_travels() -> None:
    made = StepJournal()
    made.made(close(1, [0, 1, [[0, 0, 4]]], [2, 1, [[0, 4, 8]]]))
    made.made(close(2, [0, 2, [[1, 0, 4]]]))
    made.made(close(1, [2, 1, []], optimizer=1))
    made.drop(0, [[1, 4, 8]])
    other = StepJournal()
    other.load(made.dump())
    for found in (made, other):
        assert found.done.rows() == [[0, 0, 8], [1, 0, 4]] and found.gradients == {(0, 0): 2, (0, 2): 1, (1, 2): 1}
        assert [each.step for each in found.since(0, 1)] == [2] and found.since(0, 2) == [] and list(found.dropped) == [(0, 1, 4, 8)]
    assert other.since(0, 0) == [close(1, [0, 1, [[0, 0, 4]]], [2, 1, [[0, 4, 8]]]), close(2, [0, 2, [[1, 0, 4]]])]


def test_a_new_part_begins_with_nothing_done_and_an_old_one_changes_nothing() -> None:
    made = StepJournal()
    made.made(close(1, [0, 1, [[0, 0, 4]]]))
    made.made(close(2, [0, 2, [[8, 0, 4]]], of=(0, 8)))
    assert made.part == (0, 8) and made.done.rows() == [[8, 0, 4]]
    made.made(close(3, [1, 1, [[3, 0, 4]]]))  # of one who carried it over
    assert made.part == (0, 8) and made.done.rows() == [[8, 0, 4]] and made.gradients == {(0, 0): 2, (0, 1): 1}


def test_shards_together_know_the_latest_part() -> None:
    one, two = StepJournal(), StepJournal()
    one.made(close(1, [0, 1, [[0, 0, 4]]]))
    two.made(close(1, [0, 1, [[0, 0, 4]]], optimizer=1))
    two.made(close(2, [1, 1, [[0, 4, 6]]], optimizer=1))
    found = merged([one.dump(closes=False), two.dump(closes=False)])
    assert found.done.rows() == [[0, 0, 6]] and found.gradients == {(0, 0): 1, (1, 0): 1, (1, 1): 1}
    two.made(close(3, [1, 2, [[0, 0, 2]]], optimizer=1, of=(1, 0)))
    assert merged([one.dump(), two.dump()]).done.rows() == merged([two.dump(), one.dump()]).done.rows() == [[0, 0, 2]]


def test_steps_that_nobody_knows_any_more_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "KEPT", 3)
    made = StepJournal()
    for step in range(1, 6):
        made.made(close(step, [0, step, []]))
    assert [each.step for each in made.since(0, 2)] == [3, 4, 5]
    with pytest.raises(StateLost, match="from 2 on"):
        made.since(0, 1)
