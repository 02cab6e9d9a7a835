"""Lays parameters out in flat buckets, in the order in which backward makes their gradients.

order of backward:   head.bias  head.weight  | block5.fc.bias  block5.fc.weight  | ...
bucket 0 (small, so that the first exchange starts early)  | bucket 1             | ...
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm.shm.shared_reductions import DTYPES
from paceline.native.functions import load_functions

ALIGN = 64  # bytes: each parameter starts on a cache line


class BucketShape(NamedTuple):
    """The properties of a parameter that its bucket needs."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    # Parameters of different kinds share no bucket. Parameters with a kind lie there without gaps.
    kind: Hashable = None

    @classmethod
    def of_parameter(cls, parameter: Tensor) -> BucketShape:
        """Describe a parameter. If its strides overlap or have holes, contiguous ones are used."""
        # On "meta", torch works out strides without allocating memory.
        dense = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format)
        return cls(tuple(parameter.shape), tuple(dense.stride()), parameter.dtype, parameter.device)

    @property
    def numel(self) -> int:
        count = 1
        for length in self.size:
            count *= length
        return count

    @property
    def size_in_memory(self) -> tuple[int, ...]:
        """The size with dims in the order of memory: the largest stride first."""
        # `sorted` is stable: dims of equal strides keep their order.
        order = sorted(range(len(self.size)), key=lambda dim: -self.stride[dim])
        return tuple(self.size[dim] for dim in order)

    @property
    def padded_numel(self) -> int:
        """Number of elements that the parameter takes in a bucket, the gap behind it included."""
        step = (ALIGN // self.dtype.itemsize or 1) if self.kind is None else 1
        return -(-self.numel // step) * step


class Bucket(NamedTuple):
    """A flat tensor, and the parameters that lie in it.

    flat: Memory of the bucket, of one dim.
    members: Number of each parameter.
    views: View of each parameter in `flat`, with the parameter's shape and strides.
    """

    flat: Tensor
    members: tuple[int, ...]
    views: tuple[Tensor, ...]

    def views_over(self, flat: Tensor) -> list[Tensor]:
        """View another flat tensor of the same length as the members of this bucket."""
        # Views keep their offsets from the begin of the bucket.
        start = self.flat.storage_offset()
        return [
            flat.as_strided(
                view.size(), view.stride(), flat.storage_offset() + view.storage_offset() - start
            )
            for view in self.views
        ]


def cut_runs(
    shapes: Sequence[BucketShape], order: Iterable[int], limit: int, first: int | None = None
) -> list[list[int]]:
    """Cut parameters into runs, one for each bucket.

    All parameters of a run have the same dtype, device and kind. A parameter above the limit gets a
    run of its own. Kinds that alternate fill runs of their own side by side.

    Args:
        shapes: Shape of each parameter.
        order: Numbers of the parameters, in the order of their gradients.
        limit: Most bytes of a run.
        first: Most bytes of the first run. Default: `limit`.

    Returns:
        Numbers of the parameters of each run.
    """
    runs: list[list[int]] = []
    open_runs: dict[Hashable, tuple[list[int], int]] = {}  # by kind: the run to fill, and its bytes
    for member in order:
        shape = shapes[member]
        # Each kind has one open run at a time, which takes its parameters until it is full.
        kind = (shape.dtype, shape.device, shape.kind)
        nbytes = shape.padded_numel * shape.dtype.itemsize
        run, filled = open_runs.get(kind, ([], 0))
        # The first bucket may be smaller, so that its exchange begins early.
        bound = first if first is not None and runs and run is runs[0] else limit
        if not run or filled + nbytes > bound:
            run, filled = [], 0
            runs.append(run)
        run.append(member)
        open_runs[kind] = (run, filled + nbytes)
    return runs


def build_buckets(
    shapes: Sequence[BucketShape],
    runs: Sequence[Sequence[int]],
    empty: Callable[[int, torch.dtype, torch.device], Tensor],
) -> list[Bucket]:
    """Allocate buckets of zeros.

    Args:
        shapes: Shape of each parameter.
        runs: Numbers of the parameters of each bucket.
        empty: Allocates a flat tensor from its number of elements, dtype and device.
    """
    buckets = []
    for run in runs:
        kind = shapes[run[0]]
        flat = empty(
            max(sum(shapes[member].padded_numel for member in run), 1), kind.dtype, kind.device
        )
        flat.zero_()
        views, at = [], 0
        for member in run:
            shape = shapes[member]
            views.append(
                torch.as_strided(flat, shape.size, shape.stride, flat.storage_offset() + at)
            )
            at += shape.padded_numel
        buckets.append(Bucket(flat, tuple(run), tuple(views)))
    return buckets


def put_scaled(view: Tensor, x: Tensor, scale: float) -> None:
    """Write `x * scale` to its place in a bucket. A scale of 0 gives zeros, even for nan."""
    if scale == 0.0:
        view.zero_()
    elif scale == 1.0:
        view.copy_(x)
    else:
        torch.mul(x, scale, out=view)


def put_all_scaled(views: Sequence[Tensor], xs: Sequence[Tensor], scale: float) -> bool:
    """Write each `x * scale` to its place in a bucket, as `put_scaled` does, by one call of C.

    Returns False, and writes nothing, unless all are dense float32 or float64 tensors in the CPU's
    memory, in the order of their elements.
    """
    dtype = views[0].dtype
    if not views[0].is_cpu or dtype not in {torch.float32, torch.float64}:
        return False
    copies = array("q")  # of C's structure `pl_scaled_copy`
    for view, x in zip(views, xs, strict=True):
        count = view.numel()
        # The script may have changed or moved the parameter: C would write anywhere.
        alike = type(x) is Tensor and x.is_cpu and x.dtype is dtype and x.numel() == count
        if not (alike and x.is_contiguous() and view.is_contiguous()) or x.is_neg():
            return False
        copies.extend((view.data_ptr(), x.data_ptr(), count))
    load_functions().copy_scaled(copies.buffer_info()[0], len(views), DTYPES[dtype], scale)
    return True


def scale_in_place(grad: Tensor, scale: float) -> Tensor:
    """Scale a gradient that only the caller holds, in place. Weight 0 gives zeros, even for nan."""
    if scale == 0.0:
        return torch.zeros_like(grad)
    return grad if scale == 1.0 else grad.mul_(scale)


def scale_copy(grad: Tensor, weight: float) -> Tensor:
    """Scale a gradient that others hold as well, in a copy. Weight 0 gives zeros, even for nan."""
    if weight == 0.0:
        return torch.zeros_like(grad)
    return grad if weight == 1.0 else grad * weight


def add_gradients(into: Tensor, addend: Tensor) -> Tensor:
    """Add two gradients, dense or sparse, in place of `into` if layouts allow."""
    if into.is_sparse and not addend.is_sparse:
        return addend.add_(into)  # torch adds sparse to dense, not dense to sparse
    return into.add_(addend)


def make_sparse_gradient(indices: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """Make a sparse gradient of row indices and their values."""
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
