from __future__ import annotations

import itertools
import random

import pytest
import torch

from paceline.comm.group_protocol import OPS
from paceline.comm.reduction_rules import DTYPES, check_operation, reduce_parts
from paceline.comm.shm.segment import SLOTS
from paceline.comm.shm.shared_reductions import (
    DEPTH,
    REGISTERED,
    RegisteredMemory,
    fold_parts,
    plan_registered,
    run_phases,
)
from paceline.errors import UsageError

# ---- flow: who may be where, and what is touched there


class Book:
    """A board without memory: notes who reads and writes which place in which phase, and finds
    two at a time.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.posted = [0] * size
        self.holds: list[dict[tuple[object, ...], int]] = [{} for _ in range(size)]

    def rank(self, rank: int) -> Row:
        return Row(self, rank)


class Row:
    """The sight of one rank."""

    def __init__(self, book: Book, rank: int) -> None:
        self.book, self.rank, self.turn = book, rank, 0
        self.content: dict[int, int] = {}

    @property
    def posted(self) -> int:
        return self.book.posted[self.rank]

    def post(self) -> None:
        self.book.posted[self.rank] += 1


def story(size: int, lengths: list[int], seed: int, *, collects: bool) -> None:
    """Some flows after each other, pushed in a random order; every place holds the block that
    its reader wants.
    """
    dice, book = random.Random(seed), Book(size)
    # (rank, slot, part) -> block written there, counted over all flows
    staged: dict[tuple[int, int, int], int] = {}
    rows = [book.rank(rank) for rank in range(size)]

    def steps(row: Row):  # type: ignore[no-untyped-def]
        me = row.rank
        for blocks in lengths:
            first = row.turn

            def stage(k: int, first: int = first) -> None:
                staged.update(
                    {
                        (me, (first + k) % SLOTS, part): first + k
                        for part in range(size)
                        if part != me
                    }
                )

            def add(k: int, first: int = first) -> None:
                for r in range(size):
                    if r != me:
                        assert staged[r, (first + k) % SLOTS, me] == first + k, (
                            me,
                            "adds",
                            first + k,
                        )
                staged[me, (first + k) % SLOTS, me] = first + k

            def collect(k: int, first: int = first) -> None:
                for r in range(size):
                    if r != me:
                        assert staged[r, (first + k) % SLOTS, r] == first + k, (
                            me,
                            "collects",
                            first + k,
                        )

            for k in range(min(DEPTH, blocks)):
                stage(k)
            row.post()
            yield row.posted  # the meeting
            yield from run_phases(row, blocks, stage, add, collect if collects else None)  # type: ignore[arg-type]

    runs = [steps(row) for row in rows]
    targets: list[int | None] = [0] * size
    while any(target is not None for target in targets):
        able = [
            r
            for r, t in enumerate(targets)
            if t is not None and all(p >= t for q, p in enumerate(book.posted) if q != r)
        ]
        assert able, "nobody can go on"
        # often the same rank for a while: as far ahead as it may be
        rank = (
            dice.choice(able) if dice.random() < 0.5 else min(able, key=lambda r: dice.random() + r)
        )
        targets[rank] = next(runs[rank], None)


@pytest.mark.parametrize("collects", [True, False])
def test_no_place_is_written_while_somebody_may_still_read_it(collects: bool) -> None:
    for size, seed in itertools.product((2, 3, 4), range(60)):
        lengths = [random.Random(seed).choice([0, 1, 2, 3, 4, 5, 9]) for _ in range(4)]
        story(size, lengths, seed, collects=collects)


# ---- fold


def parts_of(count: int, dtype: torch.dtype, length: int = 37) -> list[torch.Tensor]:
    found = [
        torch.randn(length, generator=torch.Generator().manual_seed(r), dtype=torch.float64) * 4
        for r in range(count)
    ]
    return [
        x > 0
        if dtype == torch.bool
        else x.abs().to(dtype)
        if not dtype.is_floating_point
        else x.to(dtype)
        for x in found
    ]


@pytest.mark.parametrize("dtype", [d for d in DTYPES if not d.is_complex])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_fold_is_the_plain_reduction(dtype: torch.dtype, count: int) -> None:
    for op in OPS:
        try:
            check_operation(op, dtype)
        except UsageError:
            continue
        parts = parts_of(count, dtype)
        wanted = reduce_parts(op, parts)
        out = torch.empty_like(wanted)
        fold_parts(parts, out, op)
        assert torch.equal(out, wanted), op
        for me in range(count):
            mine = [part.clone() for part in parts]
            fold_parts(mine, mine[me], op, spare=torch.empty_like(wanted))
            assert torch.equal(mine[me], wanted), (op, me)
            assert all(
                torch.equal(a, b)
                for r, (a, b) in enumerate(zip(mine, parts, strict=True))
                if r != me
            ), (op, me)
        fold_parts(parts, parts[0], op)
        assert torch.equal(parts[0], wanted), op


# ---- plans


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 15, 16, 17, 1000, 3 * REGISTERED // 4 + 5])
def test_plans_cover_every_element_once(size: int, count: int) -> None:
    memory = [torch.zeros(4 * (count + 3), dtype=torch.uint8) for _ in range(size)]
    for rank in range(size):
        place = RegisteredMemory(0, memory[rank].data_ptr(), memory)
        x = memory[rank][8 : 8 + 4 * count].view(torch.float32)
        blocks, copies = plan_registered(x, place, rank)
        for parts, (source, targets, nbytes) in zip(blocks, copies, strict=True):
            assert [source, *targets] == [
                part.data_ptr() for part in parts
            ] and nbytes == 4 * parts[0].numel() <= REGISTERED
            for part in parts:
                part += rank + 1
    for region in memory:
        covered = region.view(torch.float32)
        assert bool((covered[:2] == 0).all()) and bool((covered[2 + count :] == 0).all())
        assert bool(((covered[2 : 2 + count] >= 1) & (covered[2 : 2 + count] <= size)).all())
        assert bool((covered[2 : 2 + count].diff() >= 0).all())
