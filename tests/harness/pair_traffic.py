"""Random messages between the workers of a group: what was sent is compared with what came,
whatever the order of sends and receives.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from paceline.comm.pairs import PairMessage, Pairs
from tests.harness.jobs import PATIENCE

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64, torch.bool)


class Planned(NamedTuple):
    """One message of a plan, which all ranks know."""

    source: int
    to: int
    lane: int
    seed: int


def plan(size: int, count: int, seed: int) -> list[Planned]:
    """Draw `count` messages between all ranks, themselves included, on few lanes."""
    dice = random.Random(seed)
    return [
        Planned(
            dice.randrange(size),
            dice.randrange(size),
            dice.choice((0, 1, 2, 1 << 40)),
            dice.randrange(1 << 30),
        )
        for _ in range(count)
    ]


def content(planned: Planned, largest: int = 300_000) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The head and the tensors of a planned message: small or large, empty, of several dtypes,
    some not contiguous.
    """
    dice = random.Random(planned.seed)
    generator = torch.Generator().manual_seed(planned.seed)
    tensors = []
    for _ in range(dice.choice((0, 1, 1, 1, 2, 3))):
        shape = dice.choice(
            (
                (),
                (0, 3),
                (dice.randrange(9),),
                (dice.randrange(1, 200), 7),
                (2, dice.randrange(1, largest)),
            )
        )
        x = (torch.rand(shape, generator=generator) * 200).to(dice.choice(DTYPES))
        tensors.append(x.t() if x.dim() == 2 and dice.random() < 0.3 else x)
    return {"seed": planned.seed, "parts": [[None, len(tensors)], {"a": 0.5}]}, tensors


def converse(
    pairs: Pairs, count: int, seed: int, *, pause: Callable[[], None] = lambda: None
) -> None:
    """Send this rank's part of a plan and receive what the others send, lanes in another order on
    each rank; compare.

    Some ranks send everything before they receive anything, others meanwhile from another thread.
    """
    dice = random.Random(seed * 1000 + pairs.rank)
    everything = plan(pairs.size, count, seed)
    mine = [planned for planned in everything if planned.source == pairs.rank]
    due = [planned for planned in everything if planned.to == pairs.rank]
    lanes = list(dict.fromkeys((planned.source, planned.lane) for planned in due))
    dice.shuffle(lanes)
    # a lane keeps its order
    due.sort(key=lambda planned: lanes.index((planned.source, planned.lane)))
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(_send, pairs, mine, pause, dice.random())
        if dice.random() < 0.5:
            sending.result(PATIENCE)
        works = [pairs.receive(planned.source, planned.lane) for planned in due]
        order = [*zip(due, works, strict=True)]
        dice.shuffle(order)  # whatever is waited for first
        for planned, work in order:
            pause()
            _compare(planned, work.wait(PATIENCE))
        sending.result(PATIENCE)


def _send(pairs: Pairs, mine: list[Planned], pause: Callable[[], None], often: float) -> None:
    dice = random.Random(often)
    works = []
    for planned in mine:
        head, tensors = content(planned)
        works.append((pairs.send(planned.to, planned.lane, head, tensors), tensors))
        pause()
        while works and dice.random() < often:
            work, sent = works.pop(dice.randrange(len(works)))
            work.wait(PATIENCE)
            for x in sent:
                x.zero_()  # it may be written to by now
    for work, _ in works:
        work.wait(PATIENCE)


def _compare(planned: Planned, message: PairMessage) -> None:
    head, tensors = content(planned)
    assert message.head == head
    assert len(message.tensors) == len(tensors)
    for came, sent in zip(message.tensors, tensors, strict=True):
        assert (
            came.dtype == sent.dtype
            and came.shape == sent.shape
            and came.is_contiguous()
            and torch.equal(came, sent)
        )
