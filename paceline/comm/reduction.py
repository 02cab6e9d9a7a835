"""The rules of reductions that every group obeys: which operations each dtype has, and how they
round.

float16 and bfloat16 are summed and multiplied in float32. A mean is the sum divided by the number
of ranks, once, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, dtype

from paceline.comm.group import OPS, Op
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


def admit(op: str, kind: dtype) -> Op:
    """Return `op`, if tensors of `kind` have it; else UsageError."""
    if op not in OPS:
        raise UsageError(f"op={op!r} is unknown; there are {', '.join(OPS)}")
    if kind not in DTYPES:
        raise UsageError(
            f"{kind} can't be reduced; "
            f"convert it to one of {', '.join(str(d).removeprefix('torch.') for d in DTYPES)}"
        )
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


def wide(kind: dtype, op: str) -> dtype:
    """Return the dtype in which partial results of `kind` are held: float32 for the halves where
    they are added or multiplied.
    """
    return (
        torch.float32
        if kind in (torch.float16, torch.bfloat16) and op in ("sum", "mean", "product")
        else kind
    )


def combine(op: str, total: Tensor, x: Tensor) -> Tensor:
    """Fold `x` into `total`, in place (a mean is added here and divided by `finish`)."""
    if op in ("sum", "mean"):
        return total.add_(x)
    if op == "product":
        return total.mul_(x)
    if op == "min":
        return torch.minimum(total, x, out=total)
    return torch.maximum(total, x, out=total)


def finish(op: str, total: Tensor, size: int) -> Tensor:
    """Return the result, in place, once all `size` contributions are in `total`."""
    if op != "mean":
        return total
    # the same of a power of two, in half the time
    return total.div_(size) if size & (size - 1) else total.mul_(1.0 / size)


def reduce(op: str, parts: Sequence[Tensor]) -> Tensor:
    """Return the reduction of `parts` in their order, as a new contiguous tensor of their dtype:
    the plain version, oracle of others.
    """
    first = parts[0].detach()
    total = torch.empty(first.shape, dtype=wide(first.dtype, op), device=first.device).copy_(first)
    for part in parts[1:]:
        combine(op, total, part.detach().to(total))
    return finish(op, total, len(parts)).to(first.dtype)


def crossing(source: Tensor, out: Tensor) -> bool:
    """Whether `out` overlaps `source` without being the same: then sums would overwrite values
    still to be read.
    """
    nbytes = source.numel() * source.element_size()
    return source.data_ptr() != out.data_ptr() and abs(source.data_ptr() - out.data_ptr()) < nbytes
