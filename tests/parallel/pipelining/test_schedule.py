"""What a schedule is, and that the proof finds each way to be wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.parallel.pipelining.schedule import (
    Action,
    PipelineSchedule,
    count_kept,
    order_actions,
    prove_schedule,
)


def forward(stage: int, number: int) -> Action:
    return Action("forward", stage, number)


def backward(stage: int, number: int) -> Action:
    return Action("backward", stage, number)


FIRST = (forward(0, 0), forward(0, 1), backward(0, 0), backward(0, 1))
LAST = (forward(1, 0), backward(1, 0), forward(1, 1), backward(1, 1))
GOOD = PipelineSchedule("by hand", 2, 2, (0, 1), (FIRST, LAST))
HALVES = PipelineSchedule(
    "halves", 1, 1, (0,), ((forward(0, 0), Action("input", 0, 0), Action("weight", 0, 0)),)
)


def test_a_good_schedule() -> None:
    prove_schedule(GOOD), prove_schedule(HALVES)
    assert (GOOD.ranks, GOOD.splits_backward, HALVES.splits_backward) == (2, False, True)
    assert count_kept(GOOD) == [2, 1] and count_kept(HALVES) == [1]
    assert GOOD.last_action(1) == backward(1, 1) and HALVES.last_action(0) == Action("weight", 0, 0)
    assert [GOOD.stages_of_rank(rank) for rank in range(2)] == [(0,), (1,)]


def test_what_an_action_needs() -> None:
    assert GOOD.find_needed(forward(0, 1)) == ()
    assert GOOD.find_needed(forward(1, 1)) == (forward(0, 1),)
    assert GOOD.find_needed(backward(1, 0)) == (forward(1, 0),)
    assert GOOD.find_needed(backward(0, 0)) == (forward(0, 0), backward(1, 0))
    assert HALVES.find_needed(Action("weight", 0, 0)) == (Action("input", 0, 0),)


def test_in_order() -> None:
    assert [str(action) for _, action in order_actions(GOOD)][
        -1
    ] == "backward of micro-batch 1 in stage 0"
    assert {
        rank: [action for where, action in order_actions(GOOD) if where == rank]
        for rank in range(2)
    } == {0: list(FIRST), 1: list(LAST)}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            replace(GOOD, rows=(FIRST[:-1], LAST)),
            "rank 0: too often, or .* too seldom: .*backward of micro-batch 1 in stage 0', -1",
        ),
        (
            replace(GOOD, rows=((*FIRST, FIRST[0]), LAST)),
            "'forward of micro-batch 0 in stage 0', 1",
        ),
        (replace(GOOD, rows=(LAST, FIRST)), "rank 0: too often"),
        (replace(GOOD, placed=(0, 0)), "placed"),
        (
            replace(GOOD, rows=((FIRST[1], FIRST[0], *FIRST[2:]), LAST)),
            r"goes through micro-batches as \[1, 0\]",
        ),
        (
            replace(
                GOOD,
                rows=(
                    (FIRST[0], FIRST[2], FIRST[1], FIRST[3]),
                    (LAST[0], LAST[2], LAST[1], LAST[3]),
                ),
            ),
            "nobody can go on: rank 0 at",
        ),
        (
            replace(HALVES, rows=(HALVES.rows[0][::-1],)),
            "nobody can go on: rank 0 at weight of micro-batch 0 in stage 0",
        ),
    ],
)
def test_the_proof_finds(wrong: PipelineSchedule, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        prove_schedule(wrong)
