"""Rules of reductions that every group obeys: the operations of each dtype, and how they round.

Halves (float16, bfloat16) are summed and multiplied in float32. A mean is the sum divided by the
number of ranks, once, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, dtype

from paceline.comm.group_protocol import OPS, Op
from paceline.errors import UsageError

DTYPES: tuple[dtype, ...] = (
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


def check_operation(op: str, kind: dtype) -> Op:
    """Check that tensors of dtype `kind` have the operation `op`, and return it.

    Raises `UsageError` with the operations or dtypes that go together.
    """
    if op not in OPS:
        raise UsageError(f"op={op!r} is unknown; there are {', '.join(OPS)}")
    if kind not in DTYPES:
        raise UsageError(
            f"{kind} can't be reduced; "
            f"convert it to one of {', '.join(str(d).removeprefix('torch.') for d in DTYPES)}"
        )
    # Sums of bool would be counts in a dtype that can't hold them.
    if kind == torch.bool and op not in ("min", "max"):
        raise UsageError(
            f"a {op} of bool is not defined; use op='max' for any, op='min' for all, or convert to "
            "int64 to count"
        )
    if op == "mean" and not (kind.is_floating_point or kind.is_complex):
        raise UsageError(
            f"a mean of {kind} would not be exact; convert to a floating type, or use op='sum'"
        )
    if kind.is_complex and op in ("min", "max"):
        raise UsageError(
            f"a {op} of {kind} is not defined; reduce the absolute value, or view_as_real"
        )
    return op


@lru_cache(maxsize=128)
def is_allowed(op: str, kind: dtype) -> bool:
    """Whether tensors of dtype `kind` have the operation `op`: see `check_operation`."""
    try:
        check_operation(op, kind)
    except UsageError:
        return False
    return True


def accumulation_dtype(kind: dtype, op: str) -> dtype:
    """Return the dtype that partial results of `kind` are held in.

    It is float32 for halves that are added or multiplied, else `kind` itself.
    """
    return (
        torch.float32
        if kind in (torch.float16, torch.bfloat16) and op in ("sum", "mean", "product")
        else kind
    )


def fold_into(op: str, total: Tensor, x: Tensor) -> Tensor:
    """Fold `x` into `total`, in place. A mean is only added here; `finish_reduction` divides it."""
    if op in ("sum", "mean"):
        return total.add_(x)
    if op == "product":
        return total.mul_(x)
    if op == "min":
        return torch.minimum(total, x, out=total)
    return torch.maximum(total, x, out=total)


def finish_reduction(op: str, total: Tensor, size: int) -> Tensor:
    """Finish a reduction of `size` contributions, in place: divide if it is a mean."""
    if op != "mean":
        return total
    # For a power of two the reciprocal is exact: the same bits, in half the time.
    return total.div_(size) if size & (size - 1) else total.mul_(1.0 / size)


def reduce_parts(op: str, parts: Sequence[Tensor]) -> Tensor:
    """Reduce `parts` in their order, to a new contiguous tensor of their dtype.

    The plain version: every faster one must have the same bits.
    """
    first = parts[0].detach()
    # `empty` and `copy_` make it contiguous, whatever the strides of the parts.
    total = torch.empty(
        first.shape, dtype=accumulation_dtype(first.dtype, op), device=first.device
    ).copy_(first)
    for part in parts[1:]:
        fold_into(op, total, part.detach().to(total))
    return finish_reduction(op, total, len(parts)).to(first.dtype)


def overlaps_partly(source: Tensor, out: Tensor) -> bool:
    """Whether `out` overlaps `source` without beginning at the same address.

    A sum written to it would then overwrite values that are still to be read.
    """
    nbytes = source.numel() * source.element_size()
    return source.data_ptr() != out.data_ptr() and abs(source.data_ptr() - out.data_ptr()) < nbytes
