"""The topology of a cluster, as frozen data: hosts with their ranks and devices, and links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class DeviceSpeed:
    """Speed of matrix products in one dtype.

    Args:
        dtype: Name of the dtype.
        flops: Operations per second, two for each multiplication and addition.
        spread: Range of times of the middle half of the products, as a part of the median time.
    """

    dtype: str
    flops: float
    spread: float = 0.0


@dataclass(frozen=True)
class Device:
    """A processor or an accelerator, as one worker has it. Values of 0 or "" are unknown.

    Args:
        kind: Type of the device: "cpu", "cuda", ...
        index: Index among devices of this type.
        name: Name of the model.
        memory_bytes: Memory in total.
        free_bytes: Memory that was free.
        threads: Threads that compute for the worker.
        speeds: Speed in each measured dtype.
        copied_bytes_per_second: Rate of copies. Bytes read and bytes written both count.
        attended: Part of the threads' time for which they had a core, measured while all workers of
            the host computed.
        clock_hz: Clock of the processor while it computed.
        highest_clock_hz: Highest clock of the processor.
        governor: Policy of the system that chooses the clock.
    """

    kind: str
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

    def dtype_flops(self, dtype: str) -> float:
        """Operations per second of matrix products in this dtype. 0 if not measured."""
        return next((speed.flops for speed in self.speeds if speed.dtype == dtype), 0.0)


@dataclass(frozen=True)
class Interface:
    """A network interface of a host.

    Args:
        name: Name of the interface.
        address: Its IPv4 address.
        network: Its network, such as "10.0.0.0/24".
        bits_per_second: Speed of the interface. 0: unknown.
    """

    name: str
    address: str
    network: str
    bits_per_second: float = 0.0


@dataclass(frozen=True)
class HostRanks:
    """A host: workers that can share memory.

    Args:
        name: Name of the host.
        ranks: Ranks of its workers, in ascending order.
        address: IP address at which other hosts reach its workers.
        cores: Cores that its workers may use.
        devices: Device of each worker, in the order of `ranks`. Empty if not measured.
        quota: Cores that a control group allows. None: all.
        machine: Id of the machine. Several hosts may be on one machine.
        machine_cores: Cores of the machine.
        interfaces: Network interfaces of the host.
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
    """A measured link from one host to another, or between the workers of one host.

    Args:
        source: Index of the sending host in `Topology.hosts`.
        target: Index of the receiving host.
        latency_seconds: Half of the time that a small message takes there and back.
        bytes_per_second: Rate of one worker while other workers are idle.
        crowded_bytes_per_second: Rate while each host sends to another. 0: not measured.
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
        """Number of workers."""
        return sum(len(host.ranks) for host in self.hosts)

    def host_by_rank(self) -> tuple[int, ...]:
        """Index of the host of each rank."""
        host_by_rank = {rank: index for index, host in enumerate(self.hosts) for rank in host.ranks}
        return tuple(host_by_rank[rank] for rank in range(len(host_by_rank)))

    def host_names(self) -> tuple[str, ...]:
        """Name of the host of each rank, for messages."""
        return tuple(self.hosts[index].name for index in self.host_by_rank())

    def select_ranks(self, ranks: Sequence[int]) -> Topology:
        """Make the topology of some of the workers, without measured links.

        Their new ranks are 0, 1, ... in the order of `ranks`.
        """
        hosts, new_ranks_by_host = self.host_by_rank(), dict[int, list[int]]()
        for new_rank, rank in enumerate(ranks):
            new_ranks_by_host.setdefault(hosts[rank], []).append(new_rank)
        return Topology(
            tuple(
                replace(self.hosts[host], ranks=tuple(new_ranks))
                for host, new_ranks in new_ranks_by_host.items()
            )
        )

    def host_of(self, rank: int) -> HostRanks:
        """Host on which a worker runs."""
        return self.hosts[self.host_by_rank()[rank]]

    def device_of(self, rank: int) -> Device | None:
        """Device of a worker. None if it wasn't measured."""
        host = self.host_of(rank)
        return host.devices[host.ranks.index(rank)] if host.devices else None

    def relative_speeds(self, dtype: str = "float32") -> tuple[float, ...]:
        """Speed of each worker in matrix products of a dtype. The fastest worker has 1.

        Empty if it wasn't measured.
        """
        devices = [self.device_of(rank) for rank in range(self.size)]
        flops = [0.0 if device is None else device.dtype_flops(dtype) for device in devices]
        return tuple(each / max(flops) for each in flops) if flops and min(flops) > 0 else ()

    def find_link(self, source: int, target: int) -> HostLink | None:
        """Find the link from one host to another, or inside one. None if it wasn't measured."""
        return next(
            (link for link in self.links if (link.source, link.target) == (source, target)), None
        )
