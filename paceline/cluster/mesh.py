"""The mesh: workers as a grid with named axes, as frozen data.

mesh "data=2, tensor=2" on two hosts of two workers

          tensor 0   tensor 1
data 0    rank 0     rank 2       host a       workers that share a layer exchange most,
data 1    rank 1     rank 3       host b       so they are on one host if possible

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

# Workers exchange most along the last axes. These are laid out inside a host first.
AXIS_NAMES = ("data", "stage", "shard", "tensor")
# Axes along which workers have different samples.
SAMPLE_AXES = ("data", "shard")
LONGEST_SUGGESTION = 6  # number of meshes that an error proposes


@dataclass(frozen=True)
class Mesh:
    """Workers as a grid.

    Args:
        axes: Name and size of each axis, in the order of `AXIS_NAMES`.
        grid: The ranks. The last axis varies fastest.
    """

    axes: tuple[tuple[str, int], ...]
    grid: tuple[int, ...]

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.axes)

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self.grid)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(name for name, _ in self.axes)

    @property
    def cut_axes(self) -> tuple[str, ...]:
        """Axes along which workers hold different parts of a model.

        These are all axes of more than one worker, except `data`.
        """
        return tuple(name for name, size in self.axes if name != "data" and size > 1)

    def axis_size(self, axis: str) -> int:
        """Size of an axis. 1 if this mesh doesn't have it."""
        return dict(self.axes).get(axis, 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank, by axis."""
        # From the last axis, which varies fastest, to the first.
        position, coordinates = self.grid.index(rank), {}
        for name, size in reversed(self.axes):
            position, coordinates[name] = divmod(position, size)
        return {name: coordinates[name] for name in self.names}

    def format_coordinates(self, rank: int) -> str:
        """Format the place of a rank on axes of more than one worker: "data 0, tensor 1"."""
        return ", ".join(
            f"{name} {index}"
            for name, index in self.coordinates(rank).items()
            if self.axis_size(name) > 1
        )

    def index_along(self, rank: int, axes: Iterable[str]) -> int:
        """Index of a rank among the ranks along these axes.

        Along `SAMPLE_AXES`, for instance, it is the index of the rank's part of the samples.
        """
        coordinates, index = self.coordinates(rank), 0
        for name, size in self.axes:
            if name in axes:
                index = index * size + coordinates[name]
        return index

    def ranks_along(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """List the ranks that differ from `rank` along these axes only, in their order along them.

        The rank itself is one of them.
        """
        varying, coordinates = frozenset(axes), self.coordinates(rank)
        fixed = [(name, index) for name, index in coordinates.items() if name not in varying]
        members = [
            other
            for other in self.grid
            if all(self.coordinates(other)[name] == index for name, index in fixed)
        ]
        return tuple(sorted(members, key=lambda member: self.index_along(member, varying)))

    def rank_groups_along(self, axes: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """List all groups along these axes, each once, ordered by their first rank."""
        varying = frozenset(axes)
        return tuple(sorted({self.ranks_along(rank, varying) for rank in self.grid}))

    def crosses_hosts(self, axis: str, topology: Topology) -> bool:
        """Whether a group along an axis has workers on several hosts."""
        hosts = topology.host_by_rank()
        return any(
            len({hosts[rank] for rank in group}) > 1 for group in self.rank_groups_along([axis])
        )


def lay_out_mesh(sizes: Mapping[str, int | None], topology: Topology) -> Mesh:
    """Lay out the workers of a cluster as a mesh.

    Workers of one host become neighbours along the axes that exchange most.

    Args:
        sizes: Number of workers along each axis. One may be None: it gets the workers that remain.
        topology: Hosts of the workers.

    Raises:
        UsageError: The sizes don't fit the number of workers.
    """
    axes = _complete_sizes(sizes, topology.size)
    blocks = [
        _Block((rank,), (host,))
        for host, ranks in enumerate(topology.hosts)
        for rank in ranks.ranks
    ]
    # From the axis that exchanges most outwards: blocks grow until one has all workers.
    for _, size in reversed(axes):
        blocks = _join_blocks(blocks, size)
    return Mesh(axes, blocks[0].ranks)


def choose_mesh(asked: str, topology: Topology, *, survives: bool) -> Mesh:
    """Lay out the workers of a cluster as the mesh that a user asks for.

    Args:
        asked: The mesh as text.
        topology: Hosts of the workers.
        survives: Whether the run goes on when workers are lost.

    Raises:
        UsageError: The mesh doesn't fit the workers, or can't survive losses.
    """
    mesh = lay_out_mesh(parse_mesh(asked), topology)
    if survives and mesh.cut_axes:
        raise UsageError(
            f"mesh={asked!r} with --min-workers: a worker of a cut model has parts that no other "
            "worker of its replica has, and the others can't go on without them; leave out "
            "--min-workers (--restarts can start the whole job again), or cut nothing (--mesh data)"
        )
    return mesh


def parse_mesh(text: str) -> dict[str, int | None]:
    """Parse a mesh as users write it: `data=2, tensor=2`, or `data, tensor=2`.

    An axis without a size is None, and gets the workers that remain.
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
    sizes: dict[str, int | None] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\w+)\s*(?:=\s*(-?[0-9]{1,9}))?", part)
        if match is None:
            raise UsageError(
                f"mesh={text!r} can't be read at {part!r}; write names and sizes, e.g. "
                "mesh='data=2, tensor=2'"
            )
        if match[1] in sizes:
            raise UsageError(f"mesh={text!r} has the axis {match[1]} twice; give each axis once")
        sizes[match[1]] = None if match[2] is None else int(match[2])
    return sizes


def count_mesh_workers(text: str) -> int:
    """Count the workers of a mesh as users write it.

    Raises `UsageError` if it leaves a size open.
    """
    sizes = parse_mesh(text)
    for name, size in sizes.items():
        if size is None:
            raise UsageError(
                f"mesh={text!r} leaves the size of {name} open: give it, such as "
                f"{name}=2, or give --workers"
            )
    return prod(size for size in sizes.values() if size is not None)


@dataclass(frozen=True)
class _Block:
    """Workers that are neighbours already, in their order, and their hosts."""

    ranks: tuple[int, ...]
    hosts: tuple[int, ...]


def _join_blocks(blocks: Sequence[_Block], size: int) -> list[_Block]:
    """Join blocks, `size` at a time.

    Blocks of one host are joined first. The blocks that remain are joined across hosts.
    """
    # Blocks wait by the hosts that they are on, until there are enough.
    waiting: dict[tuple[int, ...], list[_Block]] = {}
    joined: list[_Block] = []
    for block in blocks:
        neighbours = waiting.setdefault(block.hosts, [])
        neighbours.append(block)
        if len(neighbours) == size:
            joined.append(_merge_blocks(neighbours))
            del waiting[block.hosts]
    remaining = [block for neighbours in waiting.values() for block in neighbours]
    joined += [
        _merge_blocks(remaining[start : start + size]) for start in range(0, len(remaining), size)
    ]
    return sorted(joined, key=lambda block: (block.hosts, block.ranks))


def _merge_blocks(blocks: Sequence[_Block]) -> _Block:
    """Join blocks to one, ordered by their first rank."""
    hosts = sorted({host for block in blocks for host in block.hosts})
    ordered = sorted(blocks, key=lambda block: block.ranks[0])
    return _Block(tuple(rank for block in ordered for rank in block.ranks), tuple(hosts))


def _complete_sizes(sizes: Mapping[str, int | None], workers: int) -> tuple[tuple[str, int], ...]:
    """Fill in the size that was left open, and put the axes into the order of `AXIS_NAMES`."""
    text = ", ".join(name if size is None else f"{name}={size}" for name, size in sizes.items())
    if unknown := [name for name in sizes if name not in AXIS_NAMES]:
        raise UsageError(
            f"mesh={text!r}: there is no axis {unknown[0]!r}; there are {', '.join(AXIS_NAMES)}"
        )
    if wrong := [f"{name}={size}" for name, size in sizes.items() if size is not None and size < 1]:
        raise UsageError(
            f"mesh={text!r}: {wrong[0]} is not a number of workers; sizes are 1 or more"
        )
    open_axes = [name for name, size in sizes.items() if size is None]
    if len(open_axes) > 1:
        raise UsageError(
            f"mesh={text!r} leaves the sizes of {' and '.join(open_axes)} open; "
            "leave out at most one"
        )
    # Without an open axis, the sizes have to give the number of workers. With one, they have to
    # divide it.
    fixed = prod(size for size in sizes.values() if size is not None)
    if (workers % fixed if open_axes else fixed != workers) or not sizes:
        raise UsageError(
            f"mesh={text!r} doesn't fit {workers} workers; "
            f"{_format_fitting_sizes(list(sizes) or ['data'], workers)}"
        )
    complete = {name: workers // fixed if size is None else size for name, size in sizes.items()}
    return tuple((name, complete[name]) for name in AXIS_NAMES if name in complete)


def _format_fitting_sizes(names: Sequence[str], workers: int) -> str:
    """Format sizes of these axes that would fit."""
    # All products of divisors. There are few, as jobs have few axes.
    divisors = [size for size in range(1, workers + 1) if workers % size == 0]
    fits = (
        sizes for sizes in itertools.product(divisors, repeat=len(names)) if prod(sizes) == workers
    )
    shown = itertools.islice(fits, LONGEST_SUGGESTION)
    meshes = [
        ", ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
        for sizes in shown
    ]
    return f"these fit: {' | '.join(meshes)}"
