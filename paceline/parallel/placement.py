"""Placements: which part of a logical tensor a worker holds, as rectangles.

logical tensor, 6 x 4: a fused projection of 3 parts    local tensor of tensor rank 1, 3 x 4
    0  part a, rank 0                                       0  part a (logical row 1)
    1  part a, rank 1    --- cut_dim(0, 1:2, 3:4, 5:6) ->   1  part b (logical row 3)
    2  part b, rank 0                                       2  part c (logical row 5)
    3  part b, rank 1                                                      3 regions of 1 x 4
    4  part c, rank 0
    5  part c, rank 1                                   its flat elements 2 to 7 (a piece of ZeRO-1)
                         --- cut_flat(2, 7) -------->       logical row 1, columns 2:4
                                                            logical row 3, columns 0:3     2 regions

Checkpoints, counts of bytes, norms and initial values use placements. They needn't know the cuts.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from paceline.errors import UsageError

Range = tuple[int, int]  # start and stop
Shape = tuple[int, ...]
Rectangle = tuple[Range, ...]  # a range of each dimension
# State of torch's optimizers that counts steps. It is never cut, not even beside a parameter of one
# element, where it has the parameter's shape.
STEP_COUNTS: Final = frozenset({"step", "mu_product", "eta", "mu"})


class Region(NamedTuple):
    """A rectangle of a logical tensor, and that of a local tensor with the same elements."""

    logical: Rectangle
    local: Rectangle

    @property
    def shape(self) -> Shape:
        """The shape of the logical rectangle."""
        return tuple(stop - start for start, stop in self.logical)

    def view_local(self, local: Tensor) -> Tensor:
        """View this region of a local tensor in the shape of the logical rectangle."""
        return (
            local[_slices(self.local)].view(self.shape)
            if len(self.local) != len(self.logical)
            else local[_slices(self.local)]
        )

    def view_logical(self, logical: Tensor) -> Tensor:
        """View this region of the whole logical tensor."""
        return logical[_slices(self.logical)]


@dataclass(frozen=True)
class Placement:
    """The part of one logical tensor that this worker holds as one local tensor.

    Attributes:
        name: Name of the logical tensor.
        shape: Shape of the logical tensor.
        local: Shape of the local tensor.
        regions: Regions that the local tensor consists of.
        axes: Axes of the mesh along which workers hold different parts. Along all others they hold
            the same.
        copy: Another worker along these axes holds the same part, and counts for both. That is so
            for a weight that two stages share.
    """

    name: str
    shape: Shape
    local: Shape
    regions: tuple[Region, ...]
    axes: tuple[str, ...] = ()
    copy: bool = False

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> Placement:
        """Make the placement of a tensor that is not cut."""
        everything = tuple((0, size) for size in shape)
        return cls(name, tuple(shape), tuple(shape), (Region(everything, everything),))

    @property
    def numel(self) -> int:
        """Number of elements that this worker holds."""
        return prod(self.local)

    @property
    def is_whole(self) -> bool:
        """Whether this worker holds all of the logical tensor, in its shape."""
        return self.regions == (
            Region(everything := tuple((0, size) for size in self.shape), everything),
        )

    @property
    def is_flat(self) -> bool:
        """Whether the local tensor is a flat piece, without the logical tensor's dimensions."""
        return any(len(region.local) != len(region.logical) for region in self.regions)

    def cut_dim(self, dim: int, ranges: Iterable[Range], axis: str) -> Placement:
        """Keep ranges of one dimension of the local tensor; others along `axis` have the rest."""
        if self.is_flat:
            raise UsageError(
                f"{self.name} is cut into flat pieces already, which have no dimension {dim}; "
                "cut it by tensor() first"
            )
        # `at`: where the range comes to lie in the new local tensor.
        regions, at = list[Region](), 0
        for start, stop in ranges:
            for region in self.regions:
                first, last = max(start, region.local[dim][0]), min(stop, region.local[dim][1])
                if first < last:
                    into, out_of = at - start, region.logical[dim][0] - region.local[dim][0]
                    logical = _replace_range(region.logical, dim, (first + out_of, last + out_of))
                    regions.append(
                        Region(
                            logical, _replace_range(region.local, dim, (first + into, last + into))
                        )
                    )
            at += stop - start
        local = (*self.local[:dim], at, *self.local[dim + 1 :])
        return replace(self, local=local, regions=tuple(regions), axes=_add_axis(self.axes, axis))

    def cut_flat(self, start: int, stop: int, axis: str) -> Placement:
        """Keep elements `start` to `stop` of the flat local tensor, as a piece along `axis`."""
        if self.is_flat:
            raise UsageError(f"{self.name} is cut into flat pieces already; cut it once by shard()")
        regions = [
            inner
            for region in self.regions
            for inner in _flatten_region(region, self.local, start, stop)
        ]
        return replace(
            self, local=(stop - start,), regions=tuple(regions), axes=_add_axis(self.axes, axis)
        )

    def hold_along(self, axis: str, *, copy: bool = False) -> Placement:
        """Keep all of it; others along `axis` hold nothing, or the same if this is a `copy`."""
        return replace(self, axes=_add_axis(self.axes, axis), copy=copy)

    def hold_nothing(self, axis: str) -> Placement:
        """Keep nothing; another worker along `axis` holds it."""
        return replace(self, local=(0,), regions=(), axes=_add_axis(self.axes, axis))

    def copy_part(self, logical: Tensor) -> Tensor:
        """Copy this worker's part out of the whole logical tensor."""
        local = logical.new_empty(self.local)
        for region in self.regions:
            region.view_local(local).copy_(region.view_logical(logical))
        return local


class Placements:
    """The placements of all parameters of a run, by parameter and by logical name."""

    def __init__(self) -> None:
        # By id of a tensor, which is kept alive so that no other tensor gets its id.
        self._by_id: dict[int, tuple[Tensor, Placement]] = {}
        # Of tensors that were replaced by others, such as whole parameters by pieces.
        self._former: dict[int, tuple[weakref.ref[Tensor], Placement]] = {}

    def __iter__(self) -> Iterator[Placement]:
        return (placement for _, placement in self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def add_placement(self, parameter: Tensor, placement: Placement) -> None:
        """Note where a parameter is, or a tensor that stands for a part of it."""
        self._by_id[id(parameter)] = parameter, placement

    def replace_tensor(self, old: Tensor, new: Tensor, placement: Placement) -> None:
        """Note that `new` replaces `old`, as a part of it; `placement_of(old)` stays as it was."""
        before = self._by_id.pop(id(old), None)
        if before is not None:
            self._former[id(old)] = weakref.ref(old), before[1]
        self.add_placement(new, placement)

    def placement_of(self, parameter: Tensor, name: str = "") -> Placement:
        """The placement of a parameter; one that was never noted is whole, and gets this name."""
        noted = self._by_id.get(id(parameter))
        if noted is not None:
            return noted[1]
        former = self._former.get(id(parameter))
        return (
            former[1]
            if former is not None and former[0]() is parameter
            else Placement.whole(name, parameter.shape)
        )

    def parameters(self) -> Iterator[tuple[Tensor, Placement]]:
        """Iterate over all parameters that were noted, with their placements."""
        return iter(self._by_id.values())


def local_part(parameter: Tensor) -> Tensor:
    """This worker's part of a parameter as a plain tensor, in the same memory."""
    # Private to torch: the attribute of a DTensor that has its local part. It isn't read by
    # `to_local`, as importing DTensor takes a second. If it is renamed, a DTensor is taken for its
    # part.
    part = getattr(parameter, "_local_tensor", None)
    return (
        parameter.data
        if part is None and isinstance(parameter, Parameter)
        else parameter
        if part is None
        else part
    )


def chunk_range(size: int, index: int, count: int) -> Range:
    """Range of part `index` of `count` parts; the last may be shorter, as in torch.chunk."""
    length = -(-size // count)
    return min(index * length, size), min((index + 1) * length, size)


def _slices(rectangle: Rectangle) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in rectangle)


def _replace_range(rectangle: Rectangle, dim: int, new: Range) -> Rectangle:
    return (*rectangle[:dim], new, *rectangle[dim + 1 :])


def _add_axis(axes: tuple[str, ...], axis: str) -> tuple[str, ...]:
    return axes if axis in axes else (*axes, axis)


def _flatten_region(region: Region, shape: Shape, start: int, stop: int) -> Iterator[Region]:
    """Yield the parts of a region between two elements of the flat local tensor, one per run."""
    offset = [first - at for (first, _), (at, _) in zip(region.logical, region.local, strict=True)]
    for rectangle in _find_runs(region.local, shape, start, stop):
        at = sum(first * prod(shape[dim + 1 :]) for dim, (first, _) in enumerate(rectangle)) - start
        logical = tuple(
            (first + by, last + by) for (first, last), by in zip(rectangle, offset, strict=True)
        )
        yield Region(logical, ((at, at + prod(last - first for first, last in rectangle)),))


def _find_runs(rectangle: Rectangle, shape: Shape, start: int, stop: int) -> Iterator[Rectangle]:
    """Yield the largest contiguous rectangles in this one, between elements `start` and `stop`.

    `start` and `stop` count elements of the flattened tensor. The first dimension is gone through
    row by row. Rows that are completely in the range, and completely in the rectangle, become one
    rectangle. Of a row that is not, the inner dimensions are searched in the same way.
    """
    if not shape:
        if start <= 0 < stop:
            yield ()
        return
    stride = prod(shape[1:])
    if not stride or start >= stop:
        return
    (first, last), inner = rectangle[0], rectangle[1:]
    full = all(extent == (0, size) for extent, size in zip(inner, shape[1:], strict=True))
    # Only rows with elements between start and stop.
    row, last = max(first, start // stride), min(last, -(-stop // stride))
    while row < last:
        if full and row * stride >= start and (row + 1) * stride <= stop:
            end = min(last, stop // stride)
            yield ((row, end), *inner)
            row = end
            continue
        for rectangle_in_row in _find_runs(
            inner, shape[1:], start - row * stride, stop - row * stride
        ):
            yield ((row, row + 1), *rectangle_in_row)
        row += 1
