"""The topology of a cluster, as frozen data: devices in hosts, links between them, and the host
of each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class DeviceSpeed:
    """The operations (two for each multiplication and addition) that products of matrices of one
    dtype reach in a second.

    `spread`: how far the middle half of the products lies apart, as a part of their median time.
    """

    dtype: str
    flops: float
    spread: float = 0.0


@dataclass(frozen=True)
class Device:
    """A processor or an accelerator, as one worker has it. What is 0 or empty isn't known.

    `memory_bytes` is what it has in all, `free_bytes` what was free. `threads` is how many of them
    compute for the worker, `attended` the part of their time for which they had a core, measured
    while all workers of the host computed. The rate of copies counts bytes that are read and
    written. Clocks are those of its processor while it computed, and at most; `governor` is what
    chooses them.
    """

    kind: str  # "cpu" | "cuda" | ...
    index: int = 0
    name: str = ""
    memory_bytes: int = 0
    free_bytes: int = 0
    threads: int = 0
    speeds: tuple[DeviceSpeed, ...] = ()
    copied_bytes_per_second: float = 0.0
    attended: float = 0.0
    clock_hz: float = 0.0
    highest_clock_hz: float = 0.0
    governor: str = ""

    def flops(self, dtype: str) -> float:
        """Floating-point operations per second of matrix products in this dtype; 0 if not
        measured.
        """
        return next((speed.flops for speed in self.speeds if speed.dtype == dtype), 0.0)


@dataclass(frozen=True)
class Interface:
    """A network interface of a host: its IPv4 address, the network that it is in
    ("10.0.0.0/24"), and what it could send (0: unknown).
    """

    name: str
    address: str
    network: str
    bits_per_second: float = 0.0


@dataclass(frozen=True)
class HostRanks:
    """Workers that can share memory.

    `ranks` ascend; `address` is the IP address its workers are reached at.

    `devices` has the device of each worker, in the order of `ranks`, where it was measured. `quota`
    is how many cores a control group leaves (None: all). Hosts with the same `machine` are one
    machine, which has `machine_cores`.
    """

    name: str
    ranks: tuple[int, ...]
    address: str
    cores: int = 1
    devices: tuple[Device, ...] = ()
    quota: float | None = None
    machine: str = ""
    machine_cores: int = 0
    interfaces: tuple[Interface, ...] = ()


@dataclass(frozen=True)
class HostLink:
    """The link from one host to another (indices into `Topology.hosts`), or between the workers of
    one, as measured.

    `latency_seconds` is half of what a small message takes there and back, `bytes_per_second` what
    one worker sends while the others rest, and `crowded_bytes_per_second` while each host sends to
    another (0: not measured).
    """

    source: int
    target: int
    latency_seconds: float
    bytes_per_second: float
    crowded_bytes_per_second: float = 0.0


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
        """Return the hosts of these workers alone, which are numbered anew, in this order.

        Measured links are left out.
        """
        where, found = self.where(), dict[int, list[int]]()
        for number, rank in enumerate(ranks):
            found.setdefault(where[rank], []).append(number)
        return Topology(
            tuple(
                replace(self.hosts[host], ranks=tuple(numbers)) for host, numbers in found.items()
            )
        )

    def of(self, rank: int) -> HostRanks:
        """Return the host that `rank` runs on."""
        return self.hosts[self.where()[rank]]

    def device(self, rank: int) -> Device | None:
        """Return the device of a worker; None where it wasn't measured."""
        host = self.of(rank)
        return host.devices[host.ranks.index(rank)] if host.devices else None

    def speeds(self, dtype: str = "float32") -> tuple[float, ...]:
        """Speed of matrix products of each worker in this dtype, as a part of the fastest one's.

        Empty if it wasn't measured.
        """
        devices = [self.device(rank) for rank in range(self.size)]
        found = [0.0 if device is None else device.flops(dtype) for device in devices]
        return tuple(each / max(found) for each in found) if found and min(found) > 0 else ()

    def link(self, source: int, target: int) -> HostLink | None:
        """Return the link from one host to another, or inside of one; None where it wasn't
        measured.
        """
        return next(
            (link for link in self.links if (link.source, link.target) == (source, target)), None
        )
