"""The cluster that is planned for, as plain data: measured, described by hand, or this host.

Speeds of workers are relative to this machine, on which the script was measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.cluster.topology import Topology
from paceline.comm.schedule import LinkSpeed

# The link of a host where nothing limits it, as between two processes of one machine.
UNLIMITED = LinkSpeed(50e-6, 2.5e9)


@dataclass(frozen=True)
class PlannedHost:
    """One host.

    Attributes:
        name: Name of the host.
        workers: Number of its workers.
        threads: Threads of each worker.
        cores: Cores of the machine.
        quota: Cores that a control group allows the host. None: all.
        flops: Operations per second of each worker while all workers of the host compute. Empty:
            each core is as fast as here.
        up: Link from the host to others.
        down: Link from others to the host.
        machine: Id of the machine. Several hosts may be on one machine. Empty: its own.
    """

    name: str
    workers: int
    threads: int
    cores: float
    quota: float | None = None
    flops: tuple[float, ...] = ()
    up: LinkSpeed = UNLIMITED
    down: LinkSpeed = UNLIMITED
    machine: str = ""

    @property
    def demand(self) -> float:
        """Cores that the workers would keep busy if the machine had any number of them."""
        wanted = float(self.workers * self.threads)
        return wanted if self.quota is None else min(wanted, self.quota)


@dataclass(frozen=True)
class PlannedCluster:
    """The hosts on which a run is planned. `source` names where they come from."""

    hosts: tuple[PlannedHost, ...]
    source: str

    @property
    def workers(self) -> int:
        """Number of workers."""
        return sum(host.workers for host in self.hosts)

    def host_of_workers(self) -> tuple[int, ...]:
        """Index of the host of each worker."""
        return tuple(i for i, host in enumerate(self.hosts) for _ in range(host.workers))

    def scale_links(self, factor: float) -> PlannedCluster:
        """Make a cluster whose links between hosts are `factor` times as fast."""
        return replace(
            self,
            hosts=tuple(
                replace(
                    host,
                    up=host.up._replace(bytes_per_second=host.up.bytes_per_second * factor),
                    down=host.down._replace(bytes_per_second=host.down.bytes_per_second * factor),
                )
                for host in self.hosts
            ),
        )

    def machine_load(self, index: int) -> float:
        """Cores that all workers of a host's machine want, as a part of the machine's cores."""
        host = self.hosts[index]
        together = [each for each in self.hosts if each is host or each.machine == host.machine]
        return sum(each.demand for each in together if host.machine or each is host) / host.cores


def describe_this_host(workers: int, cores: int) -> PlannedCluster:
    """Describe this host with a number of workers, which divide its cores."""
    host = PlannedHost("this host", workers, max(1, cores // workers), float(cores))
    return PlannedCluster((host,), "this host")


def convert_topology(topology: Topology, source: str) -> PlannedCluster:
    """Convert a measured cluster.

    The link of a host is its fastest way to another host, as measured while all hosts sent.
    """
    hosts = []
    for index, host in enumerate(topology.hosts):
        threads = max((device.threads for device in host.devices), default=0)
        flops = tuple(device.dtype_flops("float32") for device in host.devices)
        hosts.append(
            PlannedHost(
                host.name,
                len(host.ranks),
                threads or max(1, host.cores // len(host.ranks)),
                float(host.machine_cores or host.cores),
                host.quota,
                flops if all(flops) else (),
                _find_link(topology, index, sending=True),
                _find_link(topology, index, sending=False),
                host.machine,
            )
        )
    return PlannedCluster(tuple(hosts), source)


def _find_link(topology: Topology, host: int, *, sending: bool) -> LinkSpeed:
    """Find the speed at which a host sends to others, or receives from them."""
    links = [
        link
        for link in topology.links
        if link.source != link.target and (link.source if sending else link.target) == host
    ]
    if not links:
        return UNLIMITED
    rate = max(link.crowded_bytes_per_second or link.bytes_per_second for link in links)
    return LinkSpeed(max(link.latency_seconds for link in links), rate)
