"""The mesh: workers as a grid with named axes, as frozen data.

mesh "data=2, tensor=2" on two hosts of two workers

          tensor 0   tensor 1
data 0    rank 0     rank 2       host a       workers that cut a layer between them exchange most,
data 1    rank 1     rank 3       host b       so they share a host if they can

data      replicas: the same model, other samples
shard     other samples, and each worker keeps a part of the state
stage     the same samples one after another: each worker has some of the layers
tensor    the same samples at the same time: each worker has a part of each layer
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from paceline.cluster.topology import Topology
from paceline.errors import UsageError

# the last ones talk most, and are dealt inside a host first
AXES = ("data", "stage", "shard", "tensor")
SAMPLED = ("data", "shard")  # workers that differ in these have other samples
LONGEST_SUGGESTION = 6  # meshes that an error proposes


@dataclass(frozen=True)
class Mesh:
    """Workers as a grid.

    `axes`: name and size of each axis, in the order of `AXES`; `grid`: the ranks, the last axis
    varying fastest.
    """

    axes: tuple[tuple[str, int], ...]
    grid: tuple[int, ...]

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.axes)

    @property
    def size(self) -> int:
        """The number of workers."""
        return len(self.grid)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple(name for name, _ in self.axes)

    @property
    def cut(self) -> tuple[str, ...]:
        """The axes, other than `data`, that have more than one worker: along them workers hold
        different parts of a model.
        """
        return tuple(name for name, size in self.axes if name != "data" and size > 1)

    def extent(self, axis: str) -> int:
        """Return the size of an axis; 1 for one that this mesh doesn't have."""
        return dict(self.axes).get(axis, 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank, by axis."""
        at, found = self.grid.index(rank), {}
        for name, size in reversed(self.axes):
            at, found[name] = divmod(at, size)
        return {name: found[name] for name in self.names}

    def place(self, rank: int) -> str:
        """Say where a rank is on the axes that have more than one worker: "data 0, tensor 1"."""
        return ", ".join(
            f"{name} {at}" for name, at in self.coordinates(rank).items() if self.extent(name) > 1
        )

    def index(self, rank: int, axes: Iterable[str]) -> int:
        """Return the number of a rank among those along these axes: that of its part of the
        samples along `SAMPLED`, for instance.
        """
        place, found = self.coordinates(rank), 0
        for name, size in self.axes:
            if name in axes:
                found = found * size + place[name]
        return found

    def group(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` along these axes alone, in the order of
        `index`; the rank itself is one of them.
        """
        wanted, mine = frozenset(axes), self.coordinates(rank)
        fixed = [(name, at) for name, at in mine.items() if name not in wanted]
        others = [
            other
            for other in self.grid
            if all(self.coordinates(other)[name] == at for name, at in fixed)
        ]
        return tuple(sorted(others, key=lambda other: self.index(other, wanted)))

    def groups(self, axes: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Return all groups along these axes, each once, ordered by their first rank."""
        wanted = frozenset(axes)
        return tuple(sorted({self.group(rank, wanted) for rank in self.grid}))

    def crosses_hosts(self, axis: str, topology: Topology) -> bool:
        """Whether a group along an axis has workers on several hosts."""
        where = topology.where()
        return any(len({where[rank] for rank in group}) > 1 for group in self.groups([axis]))


def lay_out(sizes: Mapping[str, int | None], topology: Topology) -> Mesh:
    """Deal the workers of a cluster to a mesh of these sizes; one may be None, and is what remains.

    Workers of one host are neighbours along the axes that talk most. Raises `UsageError` where the
    sizes don't fit the workers.
    """
    axes = _complete(sizes, topology.size)
    blocks = [
        _Block((rank,), (host,))
        for host, ranks in enumerate(topology.hosts)
        for rank in ranks.ranks
    ]
    for _, size in reversed(axes):
        blocks = _join(blocks, size)
    return Mesh(axes, blocks[0].ranks)


def choose(asked: str, topology: Topology, *, survives: bool) -> Mesh:
    """Deal the workers of a cluster to the mesh that a user asks for.

    `survives`: the run goes on when workers are lost.

    Raises `UsageError` where it doesn't fit, or can't be had.
    """
    mesh = lay_out(read(asked), topology)
    if survives and mesh.cut:
        raise UsageError(
            f"mesh={asked!r} with --min-workers: a worker of a cut model has parts that no other "
            "of its replica has, and nobody goes on "
            "without them; leave out --min-workers (then --restarts has the whole job start "
            "again), or cut nothing (--mesh data)"
        )
    return mesh


def read(text: str) -> dict[str, int | None]:
    """Read a mesh as users write it: `data=2, tensor=2`, or `data, tensor=2`, where the size of
    `data` is what remains.
    """
    if not isinstance(text, str):
        example = (
            ", ".join(f"{name}={size}" for name, size in text.items())
            if isinstance(text, Mapping)
            else "data=2, tensor=2"
        )
        raise UsageError(
            f"mesh={text!r} is a {type(text).__name__}, and has to be text: mesh={example!r}"
        )
    found: dict[str, int | None] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\w+)\s*(?:=\s*(-?[0-9]{1,9}))?", part)
        if match is None:
            raise UsageError(
                f"mesh={text!r} can't be read at {part!r}; write names and sizes, e.g. "
                "mesh='data=2, tensor=2'"
            )
        if match[1] in found:
            raise UsageError(f"mesh={text!r} has the axis {match[1]} twice; give each axis once")
        found[match[1]] = None if match[2] is None else int(match[2])
    return found


def workers(text: str) -> int:
    """Return the number of workers of a mesh as users write it.

    Raises `UsageError` where it leaves a size open.
    """
    found = read(text)
    for name, size in found.items():
        if size is None:
            raise UsageError(
                f"mesh={text!r} leaves the size of {name} open: say how many, "
                f"{name}=2, or give --workers"
            )
    return prod(size for size in found.values() if size is not None)


@dataclass(frozen=True)
class _Block:
    """Workers that are neighbours already, in their order, and the hosts that they are on."""

    ranks: tuple[int, ...]
    hosts: tuple[int, ...]


def _join(blocks: Sequence[_Block], size: int) -> list[_Block]:
    """Join blocks, so many at a time: those of one host while there are enough, then what is
    left over, host after host.
    """
    waiting: dict[tuple[int, ...], list[_Block]] = {}
    joined: list[_Block] = []
    for block in blocks:
        row = waiting.setdefault(block.hosts, [])
        row.append(block)
        if len(row) == size:
            joined.append(_joined(row))
            del waiting[block.hosts]
    rest = [block for row in waiting.values() for block in row]
    joined += [_joined(rest[at : at + size]) for at in range(0, len(rest), size)]
    return sorted(joined, key=lambda block: (block.hosts, block.ranks))


def _joined(blocks: Sequence[_Block]) -> _Block:
    hosts = sorted({host for block in blocks for host in block.hosts})
    ordered = sorted(blocks, key=lambda block: block.ranks[0])
    return _Block(tuple(rank for block in ordered for rank in block.ranks), tuple(hosts))


def _complete(sizes: Mapping[str, int | None], workers: int) -> tuple[tuple[str, int], ...]:
    """Fill in the size that was left out, and put the axes into their order."""
    text = ", ".join(name if size is None else f"{name}={size}" for name, size in sizes.items())
    if unknown := [name for name in sizes if name not in AXES]:
        raise UsageError(
            f"mesh={text!r}: there is no axis {unknown[0]!r}; there are {', '.join(AXES)}"
        )
    if wrong := [f"{name}={size}" for name, size in sizes.items() if size is not None and size < 1]:
        raise UsageError(
            f"mesh={text!r}: {wrong[0]} is not a number of workers; sizes are 1 or more"
        )
    left_out = [name for name, size in sizes.items() if size is None]
    if len(left_out) > 1:
        raise UsageError(
            f"mesh={text!r} leaves the sizes of {' and '.join(left_out)} open; "
            "at most one can be what remains"
        )
    given = prod(size for size in sizes.values() if size is not None)
    if (workers % given if left_out else given != workers) or not sizes:
        raise UsageError(
            f"mesh={text!r} doesn't fit {workers} workers; "
            f"{_fitting(list(sizes) or ['data'], workers)}"
        )
    whole = {name: workers // given if size is None else size for name, size in sizes.items()}
    return tuple((name, whole[name]) for name in AXES if name in whole)


def _fitting(names: Sequence[str], workers: int) -> str:
    """Say which sizes of these axes would fit."""
    divisors = [size for size in range(1, workers + 1) if workers % size == 0]
    fits = (
        sizes for sizes in itertools.product(divisors, repeat=len(names)) if prod(sizes) == workers
    )
    shown = itertools.islice(fits, LONGEST_SUGGESTION)
    found = [
        ", ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
        for sizes in shown
    ]
    return f"what fits is {' | '.join(found)}"
