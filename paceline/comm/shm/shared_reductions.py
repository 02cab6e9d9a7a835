"""Reductions in shared memory: begins them, and lets C do the work (native/operations.c).

    small       at most `segment.small` bytes: every rank adds all of it, after one meeting
    staged      block by block through the stages of the segment
    registered  every rank reaches the tensors of all others: each adds its piece where it lies, and
                hands the sum out, between two posts

All ranks get the same bits: parts are added in rank order (`reduction_rules`).
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm.fingerprint import CallFingerprint
from paceline.comm.group_protocol import Op, piece_bounds
from paceline.comm.reduction_rules import check_operation
from paceline.comm.shm.registered import RegisteredMemory
from paceline.comm.shm.segment import ControlSegment, Steps
from paceline.comm.shm.shared_segment import empty_on_cpu
from paceline.native.functions import address_of, load_functions

LINE = 64  # bytes of a cache line; parts begin on one
MISMATCH = -1  # result of an operation whose ranks have different marks
# Numbers of dtypes and operations in native/reduce.h.
DTYPES: dict[torch.dtype, int] = {
    dtype: number
    for number, dtype in enumerate(
        (
            torch.float32,
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.int8,
            torch.int16,
            torch.int32,
            torch.int64,
            torch.uint8,
            torch.bool,
            torch.complex64,
            torch.complex128,
        )
    )
}
OPERATIONS: dict[str, int] = {"sum": 0, "mean": 1, "product": 2, "min": 3, "max": 4}


def advance_to_end(segment: ControlSegment) -> Steps:
    """Advance the operation that C does until it has ended. Returns 0, or MISMATCH."""
    advance, operation = load_functions().advance, segment.operation
    while (target := advance(operation)) > 0:
        yield target
    return target


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
    load_functions().begin_all_reduce(
        segment.operation,
        segment.pointer,
        x.data_ptr(),
        out.data_ptr(),
        x.numel(),
        x.element_size(),
        DTYPES.get(x.dtype, 0),
        OPERATIONS.get(op, 0),
    )
    yield from meeting
    check_operation(op, x.dtype)
    yield from advance_to_end(segment)


class SmallReduction(ctypes.Structure):
    """A small all-reduce: `pl_small` of native/operations.h."""

    _fields_ = [
        ("count", ctypes.c_int64),
        ("nbytes", ctypes.c_int64),
        ("mark", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("op", ctypes.c_int64),
    ]


def describe_small(
    segment: ControlSegment, x: Tensor, op: Op, call: CallFingerprint
) -> SmallReduction:
    """Describe the all-reduce of a tensor of at most `segment.small` bytes."""
    mark = segment.hash_call(call)
    return SmallReduction(x.numel(), x.nbytes, mark, DTYPES[x.dtype], OPERATIONS[op])


def all_reduce_small(
    segment: ControlSegment, x: Tensor, out: Tensor, op: Op, call: CallFingerprint
) -> Steps:
    """Reduce at most `segment.small` bytes: every rank adds all of it, so ranks meet only once."""
    values, addresses = describe_small(segment, x, op, call), (x.data_ptr(), out.data_ptr())
    load_functions().begin_small(segment.operation, segment.pointer, address_of(values), *addresses)
    if (yield from advance_to_end(segment)) == MISMATCH:
        yield from segment.compare_calls(call)


def reduce_scatter_staged(
    segment: ControlSegment, x: Tensor, op: Op, call: CallFingerprint, out: Tensor | None = None
) -> Steps:
    """Reduce `x`, and return this rank's piece, contiguous and of one dim; in `out` if given."""
    pieces = piece_bounds(x.numel(), segment.size)
    start, stop = pieces[segment.rank]
    out = empty_on_cpu((stop - start,), x.dtype) if out is None else out
    bounds = (ctypes.c_int64 * (segment.size + 1))(0, *(stop for _, stop in pieces))
    load_functions().begin_reduce_scatter(
        segment.operation,
        segment.pointer,
        x.data_ptr(),
        out.data_ptr(),
        address_of(bounds),
        x.element_size(),
        DTYPES.get(x.dtype, 0),
        OPERATIONS.get(op, 0),
    )
    yield from segment.meet(call)
    check_operation(op, x.dtype)
    yield from advance_to_end(segment)
    return out


class ReductionPlan(NamedTuple):
    """The work of one rank on one registered tensor."""

    parts: Any  # addresses of this rank's piece on every rank; the sum goes to all of them
    elements: int  # of the piece


def plan_registered(x: Tensor, place: RegisteredMemory, rank: int) -> ReductionPlan:
    """Plan this rank's piece of `x`, which begins and ends on cache lines."""
    offset, elements, item = x.data_ptr() - place.start, x.numel(), x.element_size()
    line, size = LINE // item or 1, len(place.regions)
    start, stop = (
        min(-(-edge // line) * line, elements) for edge in piece_bounds(elements, size)[rank]
    )
    addresses = [region.data_ptr() + offset + start * item for region in place.regions]
    return ReductionPlan((ctypes.c_void_p * size)(*addresses), stop - start)


def all_reduce_registered(segment: ControlSegment, x: Tensor, plan: ReductionPlan, op: Op) -> Steps:
    """Reduce `x` in place, in every rank's registered memory. All ranks have met for it.

    Each rank adds its piece and hands it out; nothing of the piece is touched by another rank.
    """
    check_operation(op, x.dtype)
    parts, size = address_of(plan.parts), len(plan.parts)
    load_functions().reduce(
        parts, size, parts, size, plan.elements, DTYPES[x.dtype], OPERATIONS[op]
    )
    yield segment.post()
