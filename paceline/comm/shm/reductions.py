"""Reductions in shared memory: torch's own vector operations on slices, each rank adding its part
of every block in rank order.

    block k of an ordinary tensor, 2 ranks               phase     rank 0
                                                                   rank 1
    x -> stage   the others' parts of x                   k - 2    stage[0] = x0, the part of 1
                                                                   stage[1] = x1, the part of 0
    add          my part, from x and all stages           k        stage[0] = out0 = x0 + stage[1]
                                                                   stage[1] = out1 = stage[0] + x1
    collect      the others' sums                         k + 2    out0 = stage[1]
                                                                   out1 = stage[0]

In each phase a rank stages block k + 2, adds block k and collects block k - 2, then posts; it may
be one phase ahead of the slowest, so that one late wake-up doesn't stop the others. Stages live in
the cache; x and out are read and written once. Copies are the C library's: they write whole cache
lines without reading them first, up to three times as fast as torch's.

What is reduced in place is added in place, and copied to the stage then. Registered memory (every
rank sees that of all others) is added and handed out where it lies, between two posts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import memmove
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm.fingerprint import CallFingerprint
from paceline.comm.group import Op, pieces
from paceline.comm.reduction import admit, combine, finish, wide
from paceline.comm.shm.memory import fresh
from paceline.comm.shm.registered import RegisteredMemory
from paceline.comm.shm.segment import SLOTS, ControlSegment, Steps

DEPTH = SLOTS // 2  # phases between staging and adding, and between adding and collecting
LINE = 64  # bytes: parts begin on cache lines
REGISTERED = 512 << 10  # bytes of a block of registered memory
PAIRS: dict[Op, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}
Stage = Callable[[int], None]


def flow(
    segment: ControlSegment, blocks: int, stage: Stage, add: Stage, collect: Stage | None = None
) -> Steps:
    """Return the phases of `blocks` blocks, whose first DEPTH have been staged before all met.

    A rank in phase k knows that all have ended phase k - 2, so the others are in k - 1 to k + 1:
    they read stages of blocks k - 1 to k + 1 (adding) and k - 3 to k - 1 (collecting; another part
    of the stage). SLOTS stages, used in turn, keep that apart from block k + 2.
    """
    phases = blocks + (DEPTH if collect is not None else 0)
    for k in range(phases):
        if k + DEPTH < blocks:
            stage(k + DEPTH)
        if k < blocks:
            add(k)
        if collect is not None and k >= DEPTH:
            collect(k - DEPTH)
        if k + 1 < phases:
            segment.post()
            yield segment.posted - (DEPTH - 1)
    segment.turn += blocks


class BlockCut(NamedTuple):
    """How a block is cut into the parts of the ranks, in bytes from its begin; with the
    addresses and views of each stage used.
    """

    low: int  # where my part begins
    high: int  # where it ends
    stop: int  # the length of the block
    parts: list[list[Tensor]]  # in each stage: my part as every rank has it; where mine is, the sum
    # the parts of the others: where it begins, its length, the stages of its rank
    others: list[tuple[int, int, list[int]]]


def cut(segment: ControlSegment, count: int, part: int, dtype: torch.dtype, slots: int) -> BlockCut:
    """Plan a block of `count` elements whose parts have `part` elements, or what is left; in
    each of the next `slots` stages.
    """
    item, turns = dtype.itemsize, range(segment.turn, segment.turn + slots)
    spans = [
        (min(r * part, count) * item, min((r + 1) * part, count) * item)
        for r in range(segment.size)
    ]
    low, high = spans[segment.rank]
    parts = (
        [
            [segment.stage(r, turn, low, (high - low) // item, dtype) for r in range(segment.size)]
            for turn in turns
        ]
        if high > low
        else []
    )
    others = [
        (a, b - a, [segment.stage_at(r, turn) for turn in turns])
        for r, (a, b) in enumerate(spans)
        if r != segment.rank and b > a
    ]
    return BlockCut(low, high, count * item, parts, others)


def all_reduce(segment: ControlSegment, x: Tensor, out: Tensor, op: Op, meeting: Steps) -> Steps:
    """Reduce `x` into `out`, contiguous and 1-D, the same or apart.

    `meeting`: the steps in which all ranks meet for it.
    """
    me, item, total = segment.rank, x.element_size(), x.numel()
    blocks = max(1, -(-total * item // segment.block))
    line = LINE // item * segment.size
    width = -(-total // (blocks * line)) * line  # elements of a block
    slots, part = min(SLOTS, blocks), width // segment.size
    whole = cut(segment, min(width, total), part, x.dtype, slots)
    rest = cut(segment, total - (blocks - 1) * width, part, x.dtype, slots) if blocks > 1 else whole
    last, span = blocks - 1, width * item
    source, target = x.data_ptr(), out.data_ptr()
    mine = [segment.stage_at(me, segment.turn + slot) for slot in range(SLOTS)]

    def stage(k: int) -> None:
        low, high, stop, _, _ = whole if k < last else rest
        to, at = mine[k % SLOTS], source + k * span
        if low:
            memmove(to, at, low)
        if high < stop:
            memmove(to + high, at + high, stop - high)

    def add(k: int) -> None:
        low, high, _, parts, _ = whole if k < last else rest
        if parts:
            views = parts[k % SLOTS].copy()
            summed, views[me] = (
                views[me],
                x.narrow(0, k * width + low // item, (high - low) // item),
            )
            staged, lies = mine[k % SLOTS] + low, target + k * span + low
            if source == target:  # summed where it lies, which the cache has at hand by then
                fold(views, views[me], op, spare=summed)
                memmove(staged, lies, high - low)
            else:
                fold(views, summed, op)
                memmove(lies, staged, high - low)

    def collect(k: int) -> None:
        to, slot = target + k * span, k % SLOTS
        for start, nbytes, stages in (whole if k < last else rest).others:
            memmove(to + start, stages[slot] + start, nbytes)

    for k in range(min(DEPTH, blocks)):
        stage(k)
    yield from meeting
    admit(op, x.dtype)
    yield from flow(segment, blocks, stage, add, collect)


def all_reduce_small(
    segment: ControlSegment, x: Tensor, out: Tensor, op: Op, meeting: Steps
) -> Steps:
    """Reduce at most SMALL bytes: every rank adds all of it, so all meet only once, in the steps
    of `meeting`.
    """
    parity = segment.parity
    segment.small(segment.rank, parity, x.numel(), x.dtype).copy_(x)
    yield from meeting
    admit(op, x.dtype)
    fold([segment.small(r, parity, x.numel(), x.dtype) for r in range(segment.size)], out, op)


def reduce_scatter(
    segment: ControlSegment, x: Tensor, op: Op, call: CallFingerprint, out: Tensor | None = None
) -> Steps:
    """Return this rank's piece of the reduction of `x`, contiguous and 1-D; in `out`, if that is
    given.
    """
    me, size, item, base = segment.rank, segment.size, x.element_size(), segment.turn
    cut = pieces(x.numel(), size)
    room = segment.block // size  # bytes of a part of a stage
    width = room // item
    first = cut[me][0]
    out = fresh((cut[me][1] - first,), x.dtype) if out is None else out
    source = x.data_ptr()

    def stage(k: int) -> None:
        for r, (start, stop) in enumerate(cut):
            low, high = start + k * width, min(start + (k + 1) * width, stop)
            if r != me and high > low:
                memmove(
                    segment.stage_at(me, base + k) + r * room,
                    source + low * item,
                    (high - low) * item,
                )

    def add(k: int) -> None:
        mine = out[k * width : (k + 1) * width]
        if mine.numel():
            own = x[first + k * width : first + k * width + mine.numel()]
            others = [
                segment.stage(r, base + k, me * room, mine.numel(), x.dtype) for r in range(size)
            ]
            fold([own if r == me else other for r, other in enumerate(others)], mine, op)

    blocks = max(1, -(-max(stop - start for start, stop in cut) // width))
    for k in range(min(DEPTH, blocks)):
        stage(k)
    yield from segment.meet(call)
    admit(op, x.dtype)
    yield from flow(segment, blocks, stage, add)
    return out


class ReductionPlan(NamedTuple):
    """What a rank does to one registered tensor: in each block, add every rank's view into the
    first and hand it out to the others.
    """

    blocks: list[list[Tensor]]
    copies: list[tuple[int, list[int], int]]  # from an address to addresses, bytes


def plan(x: Tensor, place: RegisteredMemory, rank: int) -> ReductionPlan:
    """Plan this rank's piece of `x`, which lies in `place`, cut so that a block of all ranks
    stays in the cache.
    """
    offset, count, item = x.data_ptr() - place.start, x.numel(), x.element_size()
    line, width = LINE // item or 1, REGISTERED // item
    start, stop = (
        min(-(-edge // line) * line, count) for edge in pieces(count, len(place.regions))[rank]
    )
    # the views may outlive an evaluation that they are first used in
    with torch.inference_mode(False):
        views = [region[offset : offset + count * item].view(x.dtype) for region in place.regions]
        blocks = [
            [view[at : min(at + width, stop)] for view in views] for at in range(start, stop, width)
        ]
    copies = [
        (first.data_ptr(), [other.data_ptr() for other in others], first.numel() * item)
        for first, *others in blocks
    ]
    return ReductionPlan(blocks, copies)


def all_reduce_registered(segment: ControlSegment, x: Tensor, plan: ReductionPlan, op: Op) -> Steps:
    """Reduce in place, in every rank's registered memory at the same offset; all have met for
    it.
    """
    admit(op, x.dtype)
    for parts, (total, others, nbytes) in zip(*plan, strict=True):
        fold(parts, parts[0], op)
        for other in others:
            memmove(other, total, nbytes)
    segment.post()
    yield segment.posted


def fold(parts: Sequence[Tensor], out: Tensor, op: Op, spare: Tensor | None = None) -> None:
    """Write the reduction of `parts` in their order to `out`, rounded once.

    `out` may be one of them; if it is neither of the first two, `spare` holds what is summed
    before.
    """
    held = wide(parts[0].dtype, op)
    if held != parts[0].dtype:
        total = parts[0].to(held)
        for part in parts[1:]:
            combine(op, total, part if op != "product" else part.to(held))
        out.copy_(finish(op, total, len(parts)))
        return
    total, pair = parts[0], PAIRS[op]
    safe = spare is None
    for part in parts[1:]:
        safe = safe or part is out or total is out
        total = pair(total, part, out=out if safe else spare)
    if total is not out and total.data_ptr() != out.data_ptr():
        out.copy_(total)
    finish(op, out, len(parts))
