"""Reductions in shared memory, by torch's vector operations on slices.

Each rank adds its own part of every block, in rank order, so all ranks get the same bits.

    block k, 2 ranks                    phase   rank 0                rank 1
    stage    the others' parts of x     k - 2   s0 = x0, part 1       s1 = x1, part 0
    add      the own part, all ranks'   k       s0 = out0 = x0 + s1   s1 = out1 = s0 + x1
    collect  the others' sums           k + 2   out0 = s1             out1 = s0

    (s0, s1: the stages of ranks 0 and 1; part r of a block is added by rank r)

In phase k a rank stages block k + 2, adds block k and collects block k - 2, then posts. It may be
one phase ahead of the slowest rank, so one late wake-up doesn't stop the others. Stages stay in the
cache; x and out are read and written once. Copies are memmove of the C library, which writes whole
cache lines without reading them first: up to three times as fast as torch's copy.

A tensor that is reduced in place is added in place, and the sum copied to the stage. Registered
memory (every rank reaches that of all others) is added and handed out where it lies, between two
posts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import memmove
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm.fingerprint import CallFingerprint
from paceline.comm.group_protocol import Op, piece_bounds
from paceline.comm.reduction_rules import (
    accumulation_dtype,
    check_operation,
    finish_reduction,
    fold_into,
)
from paceline.comm.shm.registered import RegisteredMemory
from paceline.comm.shm.segment import SLOTS, ControlSegment, Steps
from paceline.comm.shm.shared_segment import empty_on_cpu

DEPTH = SLOTS // 2  # phases from staging to adding a block, and from adding to collecting it
LINE = 64  # bytes of a cache line; parts begin on one
REGISTERED = 512 << 10  # bytes of a block of registered memory
PAIRS: dict[Op, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}
Stage = Callable[[int], None]  # works on the block of this number


def run_phases(
    segment: ControlSegment, blocks: int, stage: Stage, add: Stage, collect: Stage | None = None
) -> Steps:
    """Run the phases of `blocks` blocks. The first DEPTH of them were staged before ranks met.

    Why nothing is overwritten too early: a rank in phase k knows that all ranks have ended phase
    k - 2, so the others are in phases k - 1 to k + 1. There they read the stages of blocks k - 1 to
    k + 1 (adding) and k - 3 to k - 1 (collecting). This rank stages block k + 2, in the slot of
    block k - 2, as there are four slots. No other rank adds from that slot. One may still collect
    from it, but only this rank's own part, which staging does not touch.

    Args:
        segment: The group's memory.
        blocks: Number of blocks.
        stage: Copies a block to the stage.
        add: Adds this rank's part of a block.
        collect: Copies the sums of other ranks. Default: not needed.
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
            # DEPTH - 1 posts behind this one: the others may be one phase behind.
            yield segment.posted - (DEPTH - 1)
    segment.turn += blocks


class BlockCut(NamedTuple):
    """How a block is cut into the parts of ranks, in bytes from its begin, and its stages."""

    low: int  # where this rank's part begins
    high: int  # where it ends
    stop: int  # length of the block
    parts: list[list[Tensor]]  # for each stage, this rank's part as every rank has it
    others: list[tuple[int, int, list[int]]]  # others' parts: begin, length, address of each stage


def cut_block(
    segment: ControlSegment, count: int, part: int, dtype: torch.dtype, slots: int
) -> BlockCut:
    """Cut a block of `count` elements into parts, in each of the next `slots` stages.

    A part has `part` elements; the last ones have what is left, or nothing.
    """
    item, turns = dtype.itemsize, range(segment.turn, segment.turn + slots)
    spans = [
        (min(r * part, count) * item, min((r + 1) * part, count) * item)
        for r in range(segment.size)
    ]
    low, high = spans[segment.rank]
    parts = (
        [
            [
                segment.view_stage(r, turn, low, (high - low) // item, dtype)
                for r in range(segment.size)
            ]
            for turn in turns
        ]
        if high > low
        else []
    )
    others = [
        (a, b - a, [segment.stage_address(r, turn) for turn in turns])
        for r, (a, b) in enumerate(spans)
        if r != segment.rank and b > a
    ]
    return BlockCut(low, high, count * item, parts, others)


def all_reduce_staged(
    segment: ControlSegment, x: Tensor, out: Tensor, op: Op, meeting: Steps
) -> Steps:
    """Reduce `x` into `out`.

    Args:
        segment: The group's memory.
        x: Contiguous, of one dim.
        out: Contiguous, of one dim: `x` itself, or memory apart from it.
        op: The operation.
        meeting: Steps in which all ranks meet for it.
    """
    me, item, total = segment.rank, x.element_size(), x.numel()
    # All blocks but the last have the same width, in which each rank's part is whole cache lines.
    blocks = max(1, -(-total * item // segment.block))
    line = LINE // item * segment.size
    width = -(-total // (blocks * line)) * line  # elements of a block
    slots, part = min(SLOTS, blocks), width // segment.size
    full_cut = cut_block(segment, min(width, total), part, x.dtype, slots)
    last_cut = (
        cut_block(segment, total - (blocks - 1) * width, part, x.dtype, slots)
        if blocks > 1
        else full_cut
    )
    last, span = blocks - 1, width * item
    source, target = x.data_ptr(), out.data_ptr()
    own_stages = [segment.stage_address(me, segment.turn + slot) for slot in range(SLOTS)]

    def stage(k: int) -> None:
        # Everything but this rank's own part, which is read from `x` itself.
        low, high, stop, _, _ = full_cut if k < last else last_cut
        to, at = own_stages[k % SLOTS], source + k * span
        if low:
            memmove(to, at, low)
        if high < stop:
            memmove(to + high, at + high, stop - high)

    def add(k: int) -> None:
        low, high, _, parts, _ = full_cut if k < last else last_cut
        if parts:
            views = parts[k % SLOTS].copy()
            summed, views[me] = (
                views[me],
                x.narrow(0, k * width + low // item, (high - low) // item),
            )
            stage_address, out_address = own_stages[k % SLOTS] + low, target + k * span + low
            # In place: add where `x` is, which is in the cache by then, and copy to the stage.
            if source == target:
                fold_parts(views, views[me], op, spare=summed)
                memmove(stage_address, out_address, high - low)
            else:
                fold_parts(views, summed, op)
                memmove(out_address, stage_address, high - low)

    def collect(k: int) -> None:
        to, slot = target + k * span, k % SLOTS
        for start, nbytes, stages in (full_cut if k < last else last_cut).others:
            memmove(to + start, stages[slot] + start, nbytes)

    for k in range(min(DEPTH, blocks)):
        stage(k)
    yield from meeting
    check_operation(op, x.dtype)
    yield from run_phases(segment, blocks, stage, add, collect)


def all_reduce_small(
    segment: ControlSegment, x: Tensor, out: Tensor, op: Op, meeting: Steps
) -> Steps:
    """Reduce at most SMALL bytes: every rank adds all of it, so ranks meet only once."""
    parity = segment.parity
    segment.view_small(segment.rank, parity, x.numel(), x.dtype).copy_(x)
    yield from meeting
    check_operation(op, x.dtype)
    # All parts are there once ranks have met. No second meeting: the next one has the other half.
    fold_parts(
        [segment.view_small(r, parity, x.numel(), x.dtype) for r in range(segment.size)], out, op
    )


def reduce_scatter_staged(
    segment: ControlSegment, x: Tensor, op: Op, call: CallFingerprint, out: Tensor | None = None
) -> Steps:
    """Reduce `x`, and return this rank's piece, contiguous and of one dim; in `out` if given."""
    me, size, item, base = segment.rank, segment.size, x.element_size(), segment.turn
    cut = piece_bounds(x.numel(), size)
    room = segment.block // size  # bytes of a part of a stage
    width = room // item
    first = cut[me][0]
    out = empty_on_cpu((cut[me][1] - first,), x.dtype) if out is None else out
    source = x.data_ptr()

    def stage(k: int) -> None:
        for r, (start, stop) in enumerate(cut):
            low, high = start + k * width, min(start + (k + 1) * width, stop)
            if r != me and high > low:
                memmove(
                    segment.stage_address(me, base + k) + r * room,
                    source + low * item,
                    (high - low) * item,
                )

    def add(k: int) -> None:
        piece = out[k * width : (k + 1) * width]
        if piece.numel():
            own = x[first + k * width : first + k * width + piece.numel()]
            others = [
                segment.view_stage(r, base + k, me * room, piece.numel(), x.dtype)
                for r in range(size)
            ]
            fold_parts([own if r == me else other for r, other in enumerate(others)], piece, op)

    blocks = max(1, -(-max(stop - start for start, stop in cut) // width))
    for k in range(min(DEPTH, blocks)):
        stage(k)
    yield from segment.meet(call)
    check_operation(op, x.dtype)
    yield from run_phases(segment, blocks, stage, add)
    return out


class ReductionPlan(NamedTuple):
    """The work of one rank on one registered tensor."""

    blocks: list[list[Tensor]]  # views of this rank's piece on every rank; the first gets the sum
    # For each block: address of the sum, addresses on other ranks, number of bytes.
    copies: list[tuple[int, list[int], int]]


def plan_registered(x: Tensor, place: RegisteredMemory, rank: int) -> ReductionPlan:
    """Plan this rank's piece of `x`, in blocks small enough for the cache with all ranks' views."""
    offset, count, item = x.data_ptr() - place.start, x.numel(), x.element_size()
    line, width = LINE // item or 1, REGISTERED // item
    start, stop = (
        min(-(-edge // line) * line, count)
        for edge in piece_bounds(count, len(place.regions))[rank]
    )
    # The views may outlive the evaluation in which they are first used.
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
    """Reduce `x` in place, in every rank's registered memory. All ranks have met for it.

    Each rank adds its piece and hands it out; nothing of the piece is touched by another rank.
    """
    check_operation(op, x.dtype)
    for parts, (total, others, nbytes) in zip(*plan, strict=True):
        fold_parts(parts, parts[0], op)
        for other in others:
            memmove(other, total, nbytes)
    segment.post()
    yield segment.posted


def fold_parts(parts: Sequence[Tensor], out: Tensor, op: Op, spare: Tensor | None = None) -> None:
    """Reduce `parts` in their order, and write the result to `out`, rounded once.

    `out` may be one of the parts. If it is neither of the first two, `spare` must be given: sums
    are held there until `out` has been read.
    """
    held = accumulation_dtype(parts[0].dtype, op)
    if held != parts[0].dtype:
        total = parts[0].to(held)
        for part in parts[1:]:
            fold_into(op, total, part if op != "product" else part.to(held))
        out.copy_(finish_reduction(op, total, len(parts)))
        return
    total, pair = parts[0], PAIRS[op]
    safe = spare is None  # whether `out` may be written to: it is no part, or has been read
    for part in parts[1:]:
        safe = safe or part is out or total is out
        total = pair(total, part, out=out if safe else spare)
    if total is not out and total.data_ptr() != out.data_ptr():
        out.copy_(total)
    finish_reduction(op, out, len(parts))
