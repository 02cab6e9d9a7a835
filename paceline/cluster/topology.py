"""The topology of a cluster, as frozen data: devices in hosts, links between them, and the host of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Device:
    """A processor or an accelerator. `memory_bytes` is 0 where it isn't known."""

    kind: str  # "cpu" | "cuda" | ...
    index: int = 0
    name: str = ""
    memory_bytes: int = 0


@dataclass(frozen=True)
class HostRanks:
    """Workers that can share memory. `ranks` ascend; `address` is the IP address its workers are reached at."""

    name: str
    ranks: tuple[int, ...]
    address: str
    cores: int = 1
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True)
class HostLink:
    """The link from one host to another (indices into `Topology.hosts`), as measured."""

    source: int
    target: int
    latency_seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class Topology:
    """Hosts, ordered by their lowest rank, and the links that were measured between them."""

    hosts: tuple[HostRanks, ...]
    links: tuple[HostLink, ...] = ()

    @property
    def size(self) -> int:
        """The number of workers."""
        return sum(len(host.ranks) for host in self.hosts)

    def where(self) -> tuple[int, ...]:
        """Return the index of the host of each rank."""
        placed = {rank: index for index, host in enumerate(self.hosts) for rank in host.ranks}
        return tuple(placed[rank] for rank in range(len(placed)))

    def names(self) -> tuple[str, ...]:
        """Return the name of the host of each rank, for messages."""
        return tuple(self.hosts[index].name for index in self.where())

    def part(self, ranks: Sequence[int]) -> Topology:
        """Return the hosts of these workers alone, which are numbered anew, in this order. Measured links are left out."""
        where, found = self.where(), dict[int, list[int]]()
        for number, rank in enumerate(ranks):
            found.setdefault(where[rank], []).append(number)
        return Topology(tuple(replace(self.hosts[host], ranks=tuple(numbers)) for host, numbers in found.items()))

    def of(self, rank: int) -> HostRanks:
        """Return the host that `rank` runs on."""
        return self.hosts[self.where()[rank]]
