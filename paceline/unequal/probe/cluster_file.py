"""Reads the measured cluster of a run, compares it with the hosts, and gives facts for choices.

paceline probe                         writes cluster.json on the first host: copy it to all hosts
paceline run --cluster cluster.json    each worker reads it | all have the same digest | the hosts
                                       are the ones in the file | links and cores guide choices
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from paceline.cluster import topology_file
from paceline.cluster.topology import HostRanks, Topology
from paceline.errors import UsageError
from paceline.formatting import format_count
from paceline.sync.route_choice import RouteFacts

# a file that `paceline probe` has written, or what `pl.probe` returned
Measured: TypeAlias = str | os.PathLike[str] | Topology
SHOWN = 8  # hosts that an error names, at most


@dataclass(frozen=True)
class ClusterFile:
    """A measured cluster, and the name of its source in messages."""

    topology: Topology
    source: str

    @classmethod
    def read_cluster(
        cls, cluster: Measured | None, *, survives: bool = False
    ) -> ClusterFile | None:
        """Read the cluster that a script or the command line gives; None without one.

        `survives` says whether the run goes on when workers are lost.

        Raises:
            UsageError: It isn't a measured cluster, or the run survives losses, so hosts change.
        """
        if cluster is None:
            return None
        if survives:
            raise UsageError(
                "cluster=... says how fast the links of fixed hosts are, and with --min-workers "
                "hosts change: leave out one of the two"
            )
        if isinstance(cluster, Topology):
            return cls(cluster, "the measured cluster")
        if not isinstance(cluster, str | os.PathLike):
            raise UsageError(
                f"cluster={cluster!r} is no measured cluster: give the file that `paceline probe` "
                "wrote, or the topology that pl.probe returned"
            )
        return cls(topology_file.read_topology(Path(cluster)), Path(cluster).name)

    @property
    def digest(self) -> str:
        """Digest of the topology, equal on two workers only if their topologies are equal."""
        return hashlib.sha256(topology_file.format_topology(self.topology).encode()).hexdigest()

    def check_topology(self, present: Topology) -> None:
        """Raise `UsageError` unless the file has these hosts, their workers, and a link of each."""
        # Hosts may be listed in another order, but each needs the same number of workers.
        measured, here = (
            Counter({host.name: len(host.ranks) for host in topology.hosts})
            for topology in (self.topology, present)
        )
        if measured != here:
            raise UsageError(
                f"{self.source} was measured on {_name_hosts(measured)}, and this job has "
                f"{_name_hosts(here)}: measure it again with `paceline probe`"
            )
        for index, host in enumerate(self.topology.hosts):
            if len(self.topology.hosts) > 1 and self._host_rate(index) <= 0:
                raise UsageError(
                    f"{self.source} has no measured link of {host.name} to another host: "
                    "measure again with `paceline probe`"
                )

    def route_facts(self, present: Topology) -> RouteFacts:
        """Facts for the choice of a route, in the order of the present hosts.

        The hosts have passed `check_topology`.
        """
        indices = {host.name: index for index, host in enumerate(self.topology.hosts)}
        rates = tuple(self._host_rate(indices[host.name]) for host in present.hosts)
        between = [
            link.latency_seconds for link in self.topology.links if link.source != link.target
        ]
        return RouteFacts(rates, max(between, default=0.0), self._least_cores(), self.source)

    def _host_rate(self, host: int) -> float:
        """Rate of a host's link in bytes per second: the lesser of its best rates out and in."""
        between = [link for link in self.topology.links if link.source != link.target]
        out = max((link.bytes_per_second for link in between if link.source == host), default=0.0)
        return min(
            out,
            max((link.bytes_per_second for link in between if link.target == host), default=0.0),
        )

    def _least_cores(self) -> float:
        """Smallest number of cores of a worker, within quotas and on machines that hosts share."""
        # Hosts with the same machine name are containers that compete for its cores.
        on_machine: Counter[str] = Counter()
        for host in self.topology.hosts:
            on_machine[host.machine] += len(host.ranks)
        return min(_share_of_cores(host, on_machine[host.machine]) for host in self.topology.hosts)


def _share_of_cores(host: HostRanks, neighbours: int) -> float:
    """Number of cores of one worker, if `neighbours` workers run on the machine of the host."""
    own = (host.cores if host.quota is None else min(host.cores, host.quota)) / len(host.ranks)
    return min(own, host.machine_cores / neighbours) if host.machine and host.machine_cores else own


def _name_hosts(hosts: Counter[str]) -> str:
    words = [f"{name} ({format_count(count, 'worker')})" for name, count in hosts.items()]
    return ", ".join(words[:SHOWN]) + (
        f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    )
