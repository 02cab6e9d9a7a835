"""Parameters laid out in flat buckets, in the order in which backward makes their gradients.

order of backward:   head.bias  head.weight  | block5.fc.bias  block5.fc.weight  | ...
bucket 0 (small, so that the first exchange starts early)  | bucket 1             | ...
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ALIGN = 64  # bytes: each parameter starts on a cache line


class BucketShape(NamedTuple):
    """The facts of a parameter that its bucket needs: shape, strides, dtype and device."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    # parameters of different kinds share no bucket; where one is given they lie there without gaps
    kind: Hashable = None

    @classmethod
    def of(cls, parameter: Tensor) -> BucketShape:
        """Return the shape and strides of a parameter; contiguous strides where its own overlap
        or have holes.
        """
        dense = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format)
        return cls(tuple(parameter.shape), tuple(dense.stride()), parameter.dtype, parameter.device)

    @property
    def numel(self) -> int:
        count = 1
        for length in self.size:
            count *= length
        return count

    @property
    def lying(self) -> tuple[int, ...]:
        """The size in the order in which the elements lie in memory: dimensions with large
        strides first.
        """
        order = sorted(range(len(self.size)), key=lambda dim: -self.stride[dim])
        return tuple(self.size[dim] for dim in order)

    @property
    def room(self) -> int:
        """Number of elements that the parameter takes in a bucket."""
        step = (ALIGN // self.dtype.itemsize or 1) if self.kind is None else 1
        return -(-self.numel // step) * step


class Bucket(NamedTuple):
    """A flat tensor, the parameters that lie in it (their numbers), and the view of each with
    the parameter's strides.
    """

    flat: Tensor
    members: tuple[int, ...]
    views: tuple[Tensor, ...]

    def over(self, flat: Tensor) -> list[Tensor]:
        """Return the views of the members in another flat tensor of the same length."""
        start = self.flat.storage_offset()
        return [
            flat.as_strided(
                view.size(), view.stride(), flat.storage_offset() + view.storage_offset() - start
            )
            for view in self.views
        ]


def cut(
    shapes: Sequence[BucketShape], order: Iterable[int], limit: int, first: int | None = None
) -> list[list[int]]:
    """Cut the parameter numbers in `order` into runs of one dtype, device and kind of at most
    `limit` bytes (the first: `first` bytes).

    A parameter above the limit has a bucket of its own. Kinds that alternate fill buckets of their
    own side by side.
    """
    runs: list[list[int]] = []
    open_runs: dict[Hashable, tuple[list[int], int]] = {}
    for member in order:
        shape = shapes[member]
        kind = (shape.dtype, shape.device, shape.kind)
        nbytes = shape.room * shape.dtype.itemsize
        run, filled = open_runs.get(kind, ([], 0))
        bound = first if first is not None and runs and run is runs[0] else limit
        if not run or filled + nbytes > bound:
            run, filled = [], 0
            runs.append(run)
        run.append(member)
        open_runs[kind] = (run, filled + nbytes)
    return runs


def build(
    shapes: Sequence[BucketShape],
    runs: Sequence[Sequence[int]],
    empty: Callable[[int, torch.dtype, torch.device], Tensor],
) -> list[Bucket]:
    """Allocate the buckets with `empty(numel, dtype, device)`; all zero at first."""
    buckets = []
    for run in runs:
        kind = shapes[run[0]]
        flat = empty(max(sum(shapes[member].room for member in run), 1), kind.dtype, kind.device)
        flat.zero_()
        views, at = [], 0
        for member in run:
            shape = shapes[member]
            views.append(
                torch.as_strided(flat, shape.size, shape.stride, flat.storage_offset() + at)
            )
            at += shape.room
        buckets.append(Bucket(flat, tuple(run), tuple(views)))
    return buckets


def stretches(bucket: Bucket, below: int) -> list[slice]:
    """Return where in the bucket members of fewer than `below` elements lie side by side, the
    gaps behind them included.
    """
    begin, found = bucket.flat.storage_offset(), list[slice]()
    starts = [*(view.storage_offset() - begin for view in bucket.views), bucket.flat.numel()]
    for view, start, stop in zip(bucket.views, starts, starts[1:], strict=False):
        if view.numel() >= below:
            continue
        if found and found[-1].stop == start:
            start = found.pop().start
        found.append(slice(start, stop))
    return found


def put(view: Tensor, x: Tensor, scale: float) -> None:
    """Write `x` times `scale` to its place in a bucket; zeros for a scale of 0 (0 x nan is nan)."""
    if scale == 0.0:
        view.zero_()
    elif scale == 1.0:
        view.copy_(x)
    else:
        torch.mul(x, scale, out=view)


def scaled(grad: Tensor, scale: float) -> Tensor:
    """Return a gradient times its weight, as a tensor of our own; zeros for weight 0 (0 x nan is
    nan).
    """
    if scale == 0.0:
        return torch.zeros_like(grad)
    return grad if scale == 1.0 else grad.mul_(scale)


def weighted(grad: Tensor, weight: float) -> Tensor:
    """Multiply a gradient that others hold too by its weight; give zeros for weight 0 (0 x nan
    is nan).
    """
    if weight == 0.0:
        return torch.zeros_like(grad)
    return grad if weight == 1.0 else grad * weight


def added(into: Tensor, addend: Tensor) -> Tensor:
    """Return the sum of two gradients, in place of `into` where layouts allow (dense or sparse)."""
    if into.is_sparse and not addend.is_sparse:
        return addend.add_(into)
    return into.add_(addend)


def sparse(indices: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """Make a sparse gradient of row indices and their values."""
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
