"""Operations of C on a segment, whose ranks are advanced by one thread, in a random order."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch

from paceline.comm.group_protocol import piece_bounds
from paceline.comm.reduction_rules import is_allowed, reduce_parts
from paceline.comm.shm.registered import RegisteredMemory
from paceline.comm.shm.segment import SegmentState
from paceline.comm.shm.shared_reductions import (
    DTYPES,
    MISMATCH,
    OPERATIONS,
    SmallReduction,
    plan_registered,
)
from paceline.comm.shm.window_messages import MessageStretch
from paceline.native.functions import address_of, load_functions

native = load_functions()


def make_operation() -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(native.operation_bytes())


class Ranks:
    """The views of all ranks of one segment, in the memory of one process."""

    def __init__(self, size: int, block: int | None = None) -> None:
        self.memory = ctypes.create_string_buffer(native.segment_bytes(size) + 64)
        start = -(-address_of(self.memory) // 64) * 64
        self.states = [SegmentState() for _ in range(size)]
        for rank, state in enumerate(self.states):
            native.open_segment(address_of(state), start, rank, size)
            if block is not None:
                state.block = block
        self.size = size


class Script:
    """One rank's operations, one after the other."""

    def __init__(self, ranks: Ranks, rank: int, turns: list[tuple[str, int]], seed: int) -> None:
        self.ranks, self.rank, self.turns, self.seed = ranks, rank, turns, seed
        self.state = ranks.states[rank]
        self.operation = make_operation()
        self.steps = self.run()
        self.target: int | None = next(self.steps, None)

    def can_advance(self) -> bool:
        return self.target is not None and bool(
            native.has_reached(address_of(self.state), 0, self.target)
        )

    def run(self):  # type: ignore[no-untyped-def]
        for turn, (kind, count) in enumerate(self.turns):
            yield from getattr(self, kind)(turn, count)

    def data(self, turn: int, rank: int, count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1000 + turn * 10 + rank)
        return torch.randint(0, 1000, (count,), generator=generator).float()

    def advance(self):  # type: ignore[no-untyped-def]
        while (target := native.advance(address_of(self.operation))) > 0:
            yield target
        assert target == 0

    def all_reduce(self, turn: int, count: int):  # type: ignore[no-untyped-def]
        x = self.data(turn, self.rank, count)
        out = x if turn % 2 else torch.empty_like(x)
        place = address_of(self.operation), address_of(self.state)
        native.begin_all_reduce(*place, x.data_ptr(), out.data_ptr(), count, 4, 0, 0)
        yield native.begin_meeting(address_of(self.state), 7, None, 0)
        yield from self.advance()
        wanted = sum(self.data(turn, rank, count) for rank in range(self.ranks.size))
        assert torch.equal(out, wanted), (turn, count)  # type: ignore[arg-type]

    def small(self, turn: int, count: int):  # type: ignore[no-untyped-def]
        x = self.data(turn, self.rank, count)
        place = address_of(self.operation), address_of(self.state)
        values = SmallReduction(count, 4 * count, turn, 0, 0)
        yield native.begin_small(*place, address_of(values), x.data_ptr(), x.data_ptr())
        yield from self.advance()
        wanted = sum(self.data(turn, rank, count) for rank in range(self.ranks.size))
        assert torch.equal(x, wanted), (turn, count)  # type: ignore[arg-type]

    def reduce_scatter(self, turn: int, count: int):  # type: ignore[no-untyped-def]
        size = self.ranks.size
        pieces = piece_bounds(count, size)
        start, stop = pieces[self.rank]
        bounds = (ctypes.c_int64 * (size + 1))(0, *(stop for _, stop in pieces))
        x, out = self.data(turn, self.rank, count), torch.empty(stop - start)
        place = address_of(self.operation), address_of(self.state)
        addresses = x.data_ptr(), out.data_ptr(), address_of(bounds)
        native.begin_reduce_scatter(*place, *addresses, 4, 0, 0)
        yield native.begin_meeting(address_of(self.state), 7, None, 0)
        yield from self.advance()
        wanted = sum(self.data(turn, rank, count)[start:stop] for rank in range(size))
        assert torch.equal(out, wanted), (turn, count)  # type: ignore[arg-type]

    def messages(self, turn: int, count: int):  # type: ignore[no-untyped-def]
        """Send `count` floats to the next rank, in windows of one block."""
        block, nbytes, size = self.state.block, 4 * count, self.ranks.size
        before = (self.rank - 1) % size
        x, out = self.data(turn, self.rank, count), torch.empty(count)

        def cut(rank: int, tensor: torch.Tensor):  # type: ignore[no-untyped-def]
            stretches = [
                MessageStretch(
                    at // block, rank, 0, tensor.data_ptr() + at, min(block, nbytes - at)
                )
                for at in range(0, nbytes, block)
            ]
            return (MessageStretch * len(stretches))(*stretches)

        departures, arrivals = cut(self.rank, x), cut(before, out)
        operation, state = address_of(self.operation), address_of(self.state)
        native.begin_messages(operation, state, address_of(departures), len(departures))
        yield native.begin_meeting(state, 7, None, 0)
        native.set_arrivals(operation, address_of(arrivals), len(arrivals), -(-nbytes // block))
        yield from self.advance()
        assert torch.equal(out, self.data(turn, before, count)), (turn, count)


KINDS = ("all_reduce", "small", "reduce_scatter", "messages")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_nothing_is_overwritten_before_it_is_read(size: int) -> None:
    for seed in range(40):
        dice, ranks = random.Random(seed), Ranks(size, block=64 * size)
        # A block of a few lines: operations of up to 9 blocks, and a bit.
        counts = [
            dice.choice([0, 1, 2, 3, 4, 5, 9]) * 16 * size + dice.choice([0, 1]) for _ in KINDS
        ]
        turns = list(zip(dice.sample(KINDS, len(KINDS)), counts, strict=True)) * 2
        scripts = [Script(ranks, rank, turns, seed) for rank in range(size)]
        while any(script.target is not None for script in scripts):
            able = [script for script in scripts if script.can_advance()]
            assert able, "no rank can go on"
            # Often the same rank for a while, so that it gets as far ahead as it may.
            script = dice.choice(able) if dice.random() < 0.5 else able[seed % len(able)]
            script.target = next(script.steps, None)


@pytest.mark.parametrize(
    ("op", "dtype"), [(op, dtype) for op in OPERATIONS for dtype in DTYPES if is_allowed(op, dtype)]
)
def test_a_small_all_reduce_is_the_plain_reduction(op: str, dtype: torch.dtype) -> None:
    ranks = Ranks(3)
    values = [torch.randn(37, generator=torch.Generator().manual_seed(r)) * 4 for r in range(3)]
    parts = [x > 0 if dtype == torch.bool else x.abs().to(dtype) for x in values]
    wanted, operations = reduce_parts(op, parts), [make_operation() for _ in range(3)]
    for rank, x in enumerate(parts):
        values = SmallReduction(37, x.nbytes, 5, DTYPES[dtype], OPERATIONS[op])
        place = address_of(operations[rank]), address_of(ranks.states[rank])
        native.begin_small(*place, address_of(values), x.data_ptr(), x.data_ptr())
    for rank, x in enumerate(parts):
        assert native.advance(address_of(operations[rank])) == 0
        assert torch.equal(x, wanted)


def test_a_small_all_reduce_of_different_calls_is_a_mismatch_on_all() -> None:
    ranks, x = Ranks(2), torch.zeros(3)
    operations = [make_operation() for _ in range(2)]
    for rank, operation in enumerate(operations):
        place = address_of(operation), address_of(ranks.states[rank])
        values = SmallReduction(3, 12, rank, 0, 0)
        native.begin_small(*place, address_of(values), x.data_ptr(), x.data_ptr())
    for operation in operations:
        assert native.advance(address_of(operation)) == MISMATCH


# ---- plans


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 15, 16, 17, 1000, 100_005])
def test_plans_cover_every_element_once(size: int, count: int) -> None:
    memory = [torch.zeros(4 * (count + 3), dtype=torch.uint8) for _ in range(size)]
    covered = torch.zeros(count, dtype=torch.int32)
    for rank in range(size):
        place = RegisteredMemory(0, memory[rank].data_ptr(), memory)
        x = memory[rank][8 : 8 + 4 * count].view(torch.float32)
        plan = plan_registered(x, place, rank)
        offsets = {
            address - region.data_ptr() - 8
            for address, region in zip(plan.parts, memory, strict=True)
        }
        assert len(offsets) == 1, "the same piece on all ranks"
        start = offsets.pop() // 4
        covered[start : start + plan.elements] += 1
    assert bool((covered == 1).all())
