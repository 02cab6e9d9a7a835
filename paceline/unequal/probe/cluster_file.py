"""The measured cluster that a run is given: read, compared with the hosts, and used for choices.

paceline probe                         cluster.json on the first host, to be copied to all
paceline run --cluster cluster.json    each reads it | all have the same digest | hosts are those of
                                       the file | links, cores
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
SHOWN = 8  # hosts that an error names


@dataclass(frozen=True)
class ClusterFile:
    """A measured cluster, and where it was read."""

    topology: Topology
    source: str

    @classmethod
    def read_cluster(cls, asked: Measured | None, *, survives: bool = False) -> ClusterFile | None:
        """Read what a script or the command line asks for.

        Raises `UsageError` for what isn't a measured cluster, and for any in a run that `survives`
        losses.
        """
        if asked is None:
            return None
        if survives:
            raise UsageError(
                "cluster=... says how fast the links of fixed hosts are, and with --min-workers "
                "hosts change: leave one out"
            )
        if isinstance(asked, Topology):
            return cls(asked, "the measured cluster")
        if not isinstance(asked, str | os.PathLike):
            raise UsageError(
                f"cluster={asked!r} is no measured cluster: give the file of `paceline probe`, or "
                "what pl.probe returned"
            )
        return cls(topology_file.read_topology(Path(asked)), Path(asked).name)

    @property
    def digest(self) -> str:
        """A number that two files have in common only if they say the same."""
        return hashlib.sha256(topology_file.format_topology(self.topology).encode()).hexdigest()

    def check_topology(self, present: Topology) -> None:
        """Raise `UsageError` unless the file has these hosts, their workers, and a link of each."""
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

        `check` has found these hosts in the file.
        """
        numbers = {host.name: number for number, host in enumerate(self.topology.hosts)}
        rates = tuple(self._host_rate(numbers[host.name]) for host in present.hosts)
        between = [
            link.latency_seconds for link in self.topology.links if link.source != link.target
        ]
        return RouteFacts(rates, max(between, default=0.0), self._least_cores(), self.source)

    def _host_rate(self, host: int) -> float:
        """Rate of a host's link: the best rate out of it or into it, whichever is less."""
        between = [link for link in self.topology.links if link.source != link.target]
        out = max((link.bytes_per_second for link in between if link.source == host), default=0.0)
        return min(
            out,
            max((link.bytes_per_second for link in between if link.target == host), default=0.0),
        )

    def _least_cores(self) -> float:
        """Smallest number of cores of a worker, within quotas and on machines that hosts share."""
        on_machine: Counter[str] = Counter()
        for host in self.topology.hosts:
            on_machine[host.machine] += len(host.ranks)
        return min(_share_of_cores(host, on_machine[host.machine]) for host in self.topology.hosts)


def _share_of_cores(host: HostRanks, neighbours: int) -> float:
    own = (host.cores if host.quota is None else min(host.cores, host.quota)) / len(host.ranks)
    return min(own, host.machine_cores / neighbours) if host.machine and host.machine_cores else own


def _name_hosts(hosts: Counter[str]) -> str:
    words = [f"{name} ({format_count(count, 'worker')})" for name, count in hosts.items()]
    return ", ".join(words[:SHOWN]) + (
        f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    )
