"""What a shard does with messages: what fits is done, at its time; what doesn't is refused with
its reason.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.codec.coding import make_message, split_message
from paceline.codec.dense import int8
from paceline.codec.sparse import topk
from paceline.errors import Mismatch
from paceline.servers.protocol.message import Index, Request
from paceline.servers.protocol.parameters import (
    CloseStep,
    FillUnit,
    LoadMemories,
    PlanShard,
    PullUnit,
    PushGradient,
    ReadNorm,
)
from paceline.servers.protocol.recovery import DiscardPushes, SkipStep
from tests.harness.shard_plans import SECONDS, packed, plan

OPTIMIZER = Index(0)


def close(step: int, workers: tuple[int, ...] = (0,), **more: Any) -> CloseStep:
    return replace(CloseStep(OPTIMIZER, step, 0, workers, 1.0, ()), **more)


def push(
    unit: int, gradient: Tensor, used: bytes = b"\1", *, turn: int = 0, keep: bool = False
) -> PushGradient:
    return PushGradient(Index(unit), 1, turn, used, keep, False, gradient)


def pull(unit: int, step: int, **more: Any) -> PullUnit:
    return replace(PullUnit(Index(unit), step, False), **more)


def test_a_step_waits_for_all_and_a_read_for_the_step(begun: Any) -> None:
    for worker in (0, 1):
        for unit in (0, 1):
            begun(worker, push(unit, torch.full((16,), float(worker + 1))))
    closing, reading, early = (
        begun.send(0, request) for request in (close(1, (0, 1)), pull(1, 1), pull(1, 0))
    )
    assert torch.equal(early.wait_for_reply(SECONDS).values[:12], torch.ones(12)), (
        "what nobody has to wait for isn't held up"
    )
    begun(1, close(1, (0, 1)))
    closing.wait_for_reply(SECONDS)
    assert torch.equal(reading.wait_for_reply(SECONDS).values[:12], torch.full((12,), 1 - 0.5 * 3))
    assert torch.equal(begun(1, pull(0, 1)).values[:5], torch.full((5,), 1 - 0.25 * 3))
    begun(0, close(1, (0, 1)))  # comes again, and does nothing
    assert torch.equal(begun(1, pull(0, 1)).values[:5], torch.full((5,), 1 - 0.25 * 3))


ONES = torch.ones(16)
WRONG: dict[str, Request[Any]] = {
    "an unknown unit": push(7, ONES),
    "another length": push(0, torch.ones(15)),
    "another dtype": push(0, ONES.double()),
    "too many pieces": push(0, ONES, b"\1\1"),
    "a read of nothing": pull(-1, 0),
    "a step out of turn": close(5),
    "a step of nobody": close(1, ()),
    "a step of workers that have not pushed": close(1),
    "an optimizer that isn't there": close(1, optimizer=Index(3)),
    "another plan": PlanShard(packed(plan(9))),
    "memories that are none": LoadMemories(torch.ones(9, dtype=torch.uint8)),
    "a fill of another shape": FillUnit(Index(0), torch.ones(2, 8)),
}


@pytest.mark.parametrize("name", WRONG)
def test_is_refused_with_its_reason(begun: Any, name: str) -> None:
    with pytest.raises(Mismatch, match="the server refused it: "):
        begun(0, WRONG[name])
    assert (
        len(begun.has_reported) == 1
        and f"{WRONG[name].kind} of 0 was refused" in begun.has_reported[0]
    )
    for unit in (0, 1):
        begun(0, push(unit, ONES.clone()))
    begun(0, close(1))
    assert torch.equal(begun(0, pull(0, 1)).values[:5], torch.full((5,), 0.75))


def encoded(coding: Any, x: Tensor) -> Tensor:
    whole, message = make_message(coding, x.numel())
    coding.encode(x, message)
    return whole


PICKED = encoded(topk(0.5), torch.tensor([0.0, 4.0, 0.0, -8.0, 0.0]))
PLACED = PICKED.clone()
split_message(topk(0.5), 5, PLACED)[1][0] = 5
WRONG_CODED: dict[str, Request[Any]] = {
    "what is not coded": push(0, torch.ones(5)),
    "what is coded otherwise": push(0, encoded(int8(8), torch.ones(5))),
    "what is cut short": push(0, PICKED[:-1].clone()),
    "nothing": push(0, torch.empty(0, dtype=torch.uint8)),
    "a place that isn't there": push(0, PLACED),
    "too many pieces": push(0, PICKED, b"\1\1"),
    "another phase": push(1, encoded(int8(8), torch.ones(12))),
    "another plan": PlanShard(packed(plan())),
}


@pytest.mark.parametrize("name", WRONG_CODED)
def test_through_a_codec_it_is_refused_with_its_reason(coded: Any, name: str) -> None:
    with pytest.raises(Mismatch, match="the server refused it: "):
        coded(0, WRONG_CODED[name])
    coded(0, push(0, PICKED, turn=1))
    coded(0, push(1, encoded(int8(8), torch.ones(12)), turn=1))
    coded(0, close(1, turn=1))
    stepped = torch.tensor([1.0, 0, 1, 3, 1])
    assert torch.equal(coded(0, pull(0, 1)).values, stepped)


def test_nothing_is_kept_before_a_plan(call: Any) -> None:
    with pytest.raises(Mismatch, match="no worker has sent the plan"):
        call(0, pull(0, 0))


def test_workers_that_take_a_step_differently(begun: Any) -> None:
    for worker in (0, 1):
        for unit in (0, 1):
            begun(worker, push(unit, torch.ones(16)))
    begun.send(0, close(1, (0, 1), factor=0.5))
    with pytest.raises(Mismatch, match="with different settings, or clipped differently"):
        begun(1, close(1, (0, 1)))


def test_a_step_whose_workers_are_lost_is_left_out_in_its_turn(begun: Any) -> None:
    skipped = begun.send(0, SkipStep(OPTIMIZER, 2))
    for worker in (0, 1):
        for unit in (0, 1):
            begun(worker, push(unit, ONES, keep=True))
    begun(0, close(1, decided=True, keep=True))
    skipped.wait_for_reply(SECONDS)
    begun(1, ReadNorm(OPTIMIZER, 3, (1,), 2.0, decided=True))  # of one who is lost then
    begun(0, SkipStep(OPTIMIZER, 3))
    begun(0, SkipStep(OPTIMIZER, 3))
    for unit in (0, 1):
        begun(0, push(unit, 2 * ONES, keep=True))
    begun(0, close(4, decided=True, keep=True))
    assert torch.equal(begun(0, pull(1, 4)).values[:12], torch.full((12,), 1 - 0.5 * 3))


def test_what_is_in_no_step_is_discarded(begun: Any) -> None:
    for unit in (0, 1):
        begun(7, push(unit, ONES, keep=True))
    begun(0, DiscardPushes())
    with pytest.raises(Mismatch, match="have not pushed"):
        begun(0, close(1, (7,), decided=True))


def test_steps_that_are_decided_are_taken_in_their_order(begun: Any) -> None:
    """Another worker may hear of the second one before this server hears of the first: its
    close, its norm and its read wait.
    """
    for unit in (0, 1):
        begun(0, push(unit, torch.ones(16), keep=True))
        begun(1, push(unit, torch.full((16,), 2.0), keep=True))
    decided: dict[str, Any] = {"decided": True, "keep": True, "part": 0.5}
    norm = begun.send(1, ReadNorm(OPTIMIZER, 2, (1,), 1.0, decided=True))
    closing = begun.send(1, close(2, (1,), **decided))
    reading = begun.send(1, pull(0, 2, copy=True))
    begun(0, close(1, (0,), **decided))
    assert norm.wait_for_reply(SECONDS).norm == 64.0
    closing.wait_for_reply(SECONDS)
    assert torch.equal(
        reading.wait_for_reply(SECONDS).values[:5], torch.full((5,), 1 - 0.5 * 0.25 * (1 + 2))
    )
