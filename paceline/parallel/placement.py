"""Placements: which part of a logical tensor a worker holds, as rectangles.

logical tensor, 6 x 4: a fused projection of 3 parts      local tensor of tensor rank 1, 3 x 4
    0  part a, rank 0                                         0  part a (logical row 1)
    1  part a, rank 1     --- narrow(0, 1:2, 3:4, 5:6) -->    1  part b (logical row 3)     3
                                                                 regions of 1 x 4
    2  part b, rank 0                                         2  part c (logical row 5)
    3  part b, rank 1
    4  part c, rank 0                                     its elements 2 to 7, flat (a piece of
                                                          ZeRO-1)
    5  part c, rank 1     --- piece(2, 7) ------------->      logical row 1, columns 2:4 | row 3,
                                                              columns 0:3     2 regions

Checkpoints, counts of bytes, norms and initial values ask a placement, and not the cut that has
made it.
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
COUNTS: Final = frozenset(
    {"step", "mu_product", "eta", "mu"}
)  # what torch's optimizers keep of steps, also beside a parameter of one number


class Region(NamedTuple):
    """A rectangle of a logical tensor, and the rectangle of a local tensor that holds it: as
    many elements, in the same order.
    """

    logical: Rectangle
    local: Rectangle

    @property
    def shape(self) -> Shape:
        """The shape of the logical rectangle."""
        return tuple(stop - start for start, stop in self.logical)

    def of_local(self, local: Tensor) -> Tensor:
        """Return this region of a local tensor, in the shape of the logical rectangle.

        What is written there is written to `local`.
        """
        return (
            local[_slices(self.local)].view(self.shape)
            if len(self.local) != len(self.logical)
            else local[_slices(self.local)]
        )

    def of_logical(self, logical: Tensor) -> Tensor:
        """Return this region of the whole logical tensor, as a view."""
        return logical[_slices(self.logical)]


@dataclass(frozen=True)
class Placement:
    """The part of one logical tensor that this worker holds as one local tensor.

    `shape` is that of the logical tensor, `local` that of the local one, which consists of the
    `regions`. `axes`: those of the mesh along which workers hold different parts; along all others
    they hold the same. `copy`: another worker along these axes holds the same, and counts for both:
    a tied weight of two stages.
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
        """The number of elements that this worker holds."""
        return prod(self.local)

    @property
    def is_whole(self) -> bool:
        """Whether this worker holds all of the logical tensor, in its shape."""
        return self.regions == (
            Region(everything := tuple((0, size) for size in self.shape), everything),
        )

    @property
    def is_flat(self) -> bool:
        """Whether the local tensor is a flat piece, whose shape says nothing of the logical
        one's.
        """
        return any(len(region.local) != len(region.logical) for region in self.regions)

    def narrow(self, dim: int, ranges: Iterable[Range], axis: str) -> Placement:
        """Keep these ranges of one dimension of the local tensor, one behind the other, as
        others along `axis` hold the rest.
        """
        if self.is_flat:
            raise UsageError(
                f"{self.name} is cut into flat pieces already, which have no dimension {dim}; "
                "cut it by tensor() first"
            )
        regions, at = list[Region](), 0
        for start, stop in ranges:
            for region in self.regions:
                first, last = max(start, region.local[dim][0]), min(stop, region.local[dim][1])
                if first < last:
                    into, out_of = at - start, region.logical[dim][0] - region.local[dim][0]
                    logical = _with(region.logical, dim, (first + out_of, last + out_of))
                    regions.append(
                        Region(logical, _with(region.local, dim, (first + into, last + into)))
                    )
            at += stop - start
        local = (*self.local[:dim], at, *self.local[dim + 1 :])
        return replace(self, local=local, regions=tuple(regions), axes=_joined(self.axes, axis))

    def piece(self, start: int, stop: int, axis: str) -> Placement:
        """Keep the elements from `start` to `stop` of the flattened local tensor, as others
        along `axis` hold the rest.
        """
        if self.is_flat:
            raise UsageError(f"{self.name} is cut into flat pieces already; cut it once by shard()")
        regions = [
            found for region in self.regions for found in _flat(region, self.local, start, stop)
        ]
        return replace(
            self, local=(stop - start,), regions=tuple(regions), axes=_joined(self.axes, axis)
        )

    def along(self, axis: str, *, copy: bool = False) -> Placement:
        """Keep all of it, of which others along `axis` hold nothing; or the same, where this is
        a `copy`.
        """
        return replace(self, axes=_joined(self.axes, axis), copy=copy)

    def elsewhere(self, axis: str) -> Placement:
        """Keep nothing, as another worker along `axis` holds it."""
        return replace(self, local=(0,), regions=(), axes=_joined(self.axes, axis))

    def take(self, logical: Tensor) -> Tensor:
        """Copy this worker's part out of the whole logical tensor."""
        local = logical.new_empty(self.local)
        for region in self.regions:
            region.of_local(local).copy_(region.of_logical(logical))
        return local


class Placements:
    """The placements of all parameters of a run, by parameter and by logical name."""

    def __init__(self) -> None:
        # the tensor is kept, so that its id stays its own
        self._by_id: dict[int, tuple[Tensor, Placement]] = {}
        # of tensors that others stand for now
        self._former: dict[int, tuple[weakref.ref[Tensor], Placement]] = {}

    def __iter__(self) -> Iterator[Placement]:
        return (placement for _, placement in self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, parameter: Tensor, placement: Placement) -> None:
        """Note where a parameter, or a tensor that stands for a part of one, is from now on."""
        self._by_id[id(parameter)] = parameter, placement

    def move(self, old: Tensor, new: Tensor, placement: Placement) -> None:
        """Note that `new` holds a part of what `old` held, and counts in its place; `of(old)`
        stays what it was.
        """
        before = self._by_id.pop(id(old), None)
        if before is not None:
            self._former[id(old)] = weakref.ref(old), before[1]
        self.add(new, placement)

    def of(self, parameter: Tensor, name: str = "") -> Placement:
        """Return where a parameter is; one that nothing was noted of is whole, under this name."""
        found = self._by_id.get(id(parameter))
        if found is not None:
            return found[1]
        former = self._former.get(id(parameter))
        return (
            former[1]
            if former is not None and former[0]() is parameter
            else Placement.whole(name, parameter.shape)
        )

    def parameters(self) -> Iterator[tuple[Tensor, Placement]]:
        """Yield each parameter that was noted, with its placement."""
        return iter(self._by_id.values())


def local(parameter: Tensor) -> Tensor:
    """Return this worker's part of a parameter as a plain tensor, in the same memory."""
    part = getattr(parameter, "_local_tensor", None)  # of a DTensor; importing that takes a second
    return (
        parameter.data
        if part is None and isinstance(parameter, Parameter)
        else parameter
        if part is None
        else part
    )


def chunk(size: int, index: int, count: int) -> Range:
    """Return the range of part `index` of `count`, all of one length but for the last ones, as
    torch.chunk cuts.
    """
    length = -(-size // count)
    return min(index * length, size), min((index + 1) * length, size)


def _slices(rectangle: Rectangle) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in rectangle)


def _with(rectangle: Rectangle, dim: int, found: Range) -> Rectangle:
    return (*rectangle[:dim], found, *rectangle[dim + 1 :])


def _joined(axes: tuple[str, ...], axis: str) -> tuple[str, ...]:
    return axes if axis in axes else (*axes, axis)


def _flat(region: Region, shape: Shape, start: int, stop: int) -> Iterator[Region]:
    """Yield the parts of a region that lie between two elements of the flattened local tensor;
    each is one run of elements there.
    """
    offset = [first - at for (first, _), (at, _) in zip(region.logical, region.local, strict=True)]
    for rectangle in _runs(region.local, shape, start, stop):
        at = sum(first * prod(shape[dim + 1 :]) for dim, (first, _) in enumerate(rectangle)) - start
        logical = tuple(
            (first + by, last + by) for (first, last), by in zip(rectangle, offset, strict=True)
        )
        yield Region(logical, ((at, at + prod(last - first for first, last in rectangle)),))


def _runs(rectangle: Rectangle, shape: Shape, start: int, stop: int) -> Iterator[Rectangle]:
    """Yield the largest rectangles within this one whose elements follow each other in the
    flattened tensor, from `start` to `stop`.
    """
    if not shape:
        if start <= 0 < stop:
            yield ()
        return
    stride = prod(shape[1:])
    if not stride or start >= stop:
        return
    (first, last), inner = rectangle[0], rectangle[1:]
    full = all(found == (0, size) for found, size in zip(inner, shape[1:], strict=True))
    # rows with elements between start and stop
    row, last = max(first, start // stride), min(last, -(-stop // stride))
    while row < last:
        if full and row * stride >= start and (row + 1) * stride <= stop:
            end = min(last, stop // stride)
            yield ((row, end), *inner)
            row = end
            continue
        for found in _runs(inner, shape[1:], start - row * stride, stop - row * stride):
            yield ((row, row + 1), *found)
        row += 1
