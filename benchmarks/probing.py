"""Checks the results of `paceline probe` on each ready-made cluster of the lab.

Bandwidths, relative speeds and shared uplinks are compared with the settings of the lab.

    python benchmarks/probing.py [--clusters racks,unequal] [--rounds 3] [--quick] [--check]

Each round builds and measures each cluster. Differences are those of medians over rounds, the
largest of all links and of all workers. The bars: bandwidths within 10 % of TCP's payload at the
rate of the link (95.6 % of the bits on the wire), speeds within 5 % of the ratio of quotas, and a
measurement within 20 s. `--check` exits with 1 if a bar is missed. Nothing else may run on the
machine.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from paceline.bench import probe
from paceline.cluster import topology_file
from paceline.cluster.topology import Topology
from paceline.lab import description, kernel
from paceline.lab.description import Description
from paceline.lab.hosts import Cluster
from paceline.unequal.probe.oddities import CROWDED

PAYLOAD = 0.956  # part of the bits on the wire that are payload, as on Ethernet
LINK_BAR, SPEED_BAR, SECONDS_BAR = 0.10, 0.05, 20.0


class Difference(NamedTuple):
    """Differences between the measurement of a cluster and its settings.

    Attributes:
        link: Largest relative difference of a bandwidth.
        speed: Largest relative difference of a speed.
        seconds: Time of the measurement.
        shared: Whether exactly the links that share an uplink were found to share one.
    """

    link: float
    speed: float
    seconds: float
    shared: bool


def rate_between(cluster: Description, source: int, target: int) -> float:
    """Compute the bytes a second that TCP carries from one host to another.

    Args:
        cluster: The cluster.
        source: Index of the sending host.
        target: Index of the receiving host.
    """
    hosts = cluster.hosts
    # The slowest part of the way decides: the two hosts, and the uplinks of racks if it leaves one.
    limits = [hosts[source].up, hosts[target].down]
    racks = {name: rack for rack in cluster.racks for name in rack.hosts}
    source_rack, target_rack = racks.get(hosts[source].name), racks.get(hosts[target].name)
    if source_rack is not target_rack:
        limits += [
            None if source_rack is None else source_rack.up,
            None if target_rack is None else target_rack.down,
        ]
    return PAYLOAD / 8 * min(math.inf if limit is None else limit for limit in limits)


def speeds(cluster: Description) -> list[float]:
    """Compute the speed of each worker, relative to the fastest. A worker has one thread."""
    absolute_speeds = [
        min(1.0, (host.processors or math.inf) / host.workers)
        for host in cluster.hosts
        for _ in range(host.workers)
    ]
    return [speed / max(absolute_speeds) for speed in absolute_speeds]


def shares_uplink(cluster: Description, source: int, target: int) -> bool:
    """Tell whether a link slows down while all hosts send at once.

    Each host sends to the host at the same distance. The link slows down if the uplink of its rack
    carries less than the hosts of the rack send.

    Args:
        cluster: The cluster.
        source: Index of the sending host.
        target: Index of the receiving host.
    """
    count, shift = len(cluster.hosts), (target - source) % len(cluster.hosts)
    racks = {name: index for index, rack in enumerate(cluster.racks) for name in rack.hosts}
    rack_by_host = [racks.get(host.name, -1) for host in cluster.hosts]
    # Hosts of the same rack that send out of it at the same time.
    senders = [
        host
        for host in range(count)
        if rack_by_host[host] != rack_by_host[(host + shift) % count]
        and rack_by_host[host] == rack_by_host[source]
    ]
    if rack_by_host[source] == rack_by_host[target] or rack_by_host[source] < 0:
        return False
    sent_rate = sum(cluster.hosts[host].up or math.inf for host in senders)
    return (cluster.racks[rack_by_host[source]].up or math.inf) < CROWDED * sent_rate


def difference(
    cluster: Description, found: Sequence[Topology], seconds: Sequence[float]
) -> Difference:
    """Compare the medians of some measurements with the settings of the lab.

    Args:
        cluster: The cluster.
        found: Measurements.
        seconds: Time of each measurement.
    """
    first_measurement, largest_difference, shared = found[0], 0.0, True
    for link in (link for link in first_measurement.links if link.source != link.target):
        measured_links = [
            measured_link
            for topology in found
            if (measured_link := topology.find_link(link.source, link.target)) is not None
        ]
        rate = rate_between(cluster, link.source, link.target)
        measured_rate = statistics.median(
            measured_link.bytes_per_second for measured_link in measured_links
        )
        crowded_rate = statistics.median(
            measured_link.crowded_bytes_per_second for measured_link in measured_links
        )
        largest_difference = max(largest_difference, abs(measured_rate / rate - 1))
        # A link loses if it carries much less while other hosts send, too.
        is_losing = 0 < crowded_rate < CROWDED * measured_rate
        shared = shared and is_losing == shares_uplink(cluster, link.source, link.target)
    columns = zip(*(topology.relative_speeds() for topology in found), speeds(cluster), strict=True)
    speed_difference = max(
        abs(statistics.median(measured) / rate - 1) for *measured, rate in columns
    )
    return Difference(largest_difference, speed_difference, statistics.median(seconds), shared)


def measure(cluster: Description) -> tuple[Topology, float]:
    """Build a cluster and measure it. Returns the result, and the seconds of the measurement."""
    with tempfile.TemporaryDirectory() as folder, Cluster(cluster) as built:
        out = Path(folder) / "cluster.json"
        outcome = built.run(
            probe.__file__, "--quiet", "--out", str(out), "--folder", folder, deadline=300
        )
        if outcome.code:
            raise SystemExit(f"{cluster.name} could not be measured:\n{outcome.output}")
        seconds = re.search(r"measured in ([\d.]+) s", outcome.output)
        assert seconds is not None
        return topology_file.read_topology(out), float(seconds[1])


def line(name: str, found: Difference) -> tuple[str, bool]:
    """Format the figures of a cluster beside their bars. Also returns whether it keeps them."""
    is_kept = (
        found.link <= LINK_BAR
        and found.speed <= SPEED_BAR
        and found.seconds <= SECONDS_BAR
        and found.shared
    )
    uplinks = "as they are" if found.shared else "NOT as they are"
    text = (
        f"{name:12}  links {found.link:6.1%} off (bar {LINK_BAR:.0%})   speeds {found.speed:6.1%} "
        f"off (bar {SPEED_BAR:.0%})   "
        f"{found.seconds:5.1f} s (bar {SECONDS_BAR:g} s)   shared uplinks "
        f"{uplinks}   {'kept' if is_kept else 'MISSED'}"
    )
    return text, is_kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--clusters",
        default=",".join(description.list_ready_clusters()),
        help="names of ready-made clusters, with commas",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="one round of two clusters, to check that it runs"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    options = parser.parse_args()
    names = ["two-hosts", "unequal"] if options.quick else options.clusters.split(",")
    clusters = [description.ready(name) for name in names]
    # A lab may need a user namespace.
    kernel.seek_rights()
    measurements: dict[str, list[tuple[Topology, float]]] = {name: [] for name in names}
    for _ in range(1 if options.quick else options.rounds):
        for name, cluster in zip(names, clusters, strict=True):
            measurements[name].append(measure(cluster))
    are_bars_kept = True
    for name, cluster in zip(names, clusters, strict=True):
        topologies, seconds = zip(*measurements[name], strict=True)
        text, is_kept = line(name, difference(cluster, topologies, seconds))
        print(text, flush=True)
        are_bars_kept = are_bars_kept and is_kept
    sys.exit(1 if options.check and not are_bars_kept else 0)


if __name__ == "__main__":
    main()
