"""What `paceline probe` finds of each cluster that ships, against what the lab has set: bandwidths,
relative speeds, and shared uplinks.

    python benchmarks/probing.py [--clusters racks,unequal] [--rounds 3] [--quick] [--check]

Each round builds each cluster, and measures it. Differences are of medians over rounds, the largest
of all links and of all workers: bandwidths within 10 % of what TCP carries at the rate of the link
(its payload is 95.6 % of the wire's), speeds within 5 % of the ratio of quotas, and 20 s for
measuring. `--check` ends with 1 where a bar is missed. Nothing else may run on the machine
meanwhile.
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

PAYLOAD = 0.956  # of what is on the wire, as on Ethernet
LINK_BAR, SPEED_BAR, SECONDS_BAR = 0.10, 0.05, 20.0


class Difference(NamedTuple):
    """How far one cluster was measured from what it is, as parts, and the seconds that it took."""

    link: float
    speed: float
    seconds: float
    shared: bool  # whether just those links were seen to share an uplink that do


def rate_between(cluster: Description, source: int, target: int) -> float:
    """Return the bytes a second that TCP carries from one host to another."""
    hosts = cluster.hosts
    limits = [hosts[source].up, hosts[target].down]
    racks = {name: rack for rack in cluster.racks for name in rack.hosts}
    one, other = racks.get(hosts[source].name), racks.get(hosts[target].name)
    if one is not other:
        limits += [None if one is None else one.up, None if other is None else other.down]
    return PAYLOAD / 8 * min(math.inf if limit is None else limit for limit in limits)


def speeds(cluster: Description) -> list[float]:
    """Return the speed of each worker as a part of the fastest, hosts in their order; a worker
    has one thread.
    """
    each = [
        min(1.0, (host.processors or math.inf) / host.workers)
        for host in cluster.hosts
        for _ in range(host.workers)
    ]
    return [speed / max(each) for speed in each]


def shares_uplink(cluster: Description, source: int, target: int) -> bool:
    """Whether a link loses while each host sends to the next but so many: its rack's uplink
    carries less than its hosts send then.
    """
    count, shift = len(cluster.hosts), (target - source) % len(cluster.hosts)
    racks = {name: index for index, rack in enumerate(cluster.racks) for name in rack.hosts}
    place = [racks.get(host.name, -1) for host in cluster.hosts]
    crossing = [
        host
        for host in range(count)
        if place[host] != place[(host + shift) % count] and place[host] == place[source]
    ]
    if place[source] == place[target] or place[source] < 0:
        return False
    wanted = sum(cluster.hosts[host].up or math.inf for host in crossing)
    return (cluster.racks[place[source]].up or math.inf) < CROWDED * wanted


def difference(
    cluster: Description, found: Sequence[Topology], seconds: Sequence[float]
) -> Difference:
    """Compare the medians of some measurements with what the lab has set."""
    first, link, shared = found[0], 0.0, True
    for each in (each for each in first.links if each.source != each.target):
        links = [
            one
            for topology in found
            if (one := topology.find_link(each.source, each.target)) is not None
        ]
        right = rate_between(cluster, each.source, each.target)
        alone = statistics.median(one.bytes_per_second for one in links)
        crowded = statistics.median(one.crowded_bytes_per_second for one in links)
        link = max(link, abs(alone / right - 1))
        losing = 0 < crowded < CROWDED * alone
        shared = shared and losing == shares_uplink(cluster, each.source, each.target)
    columns = zip(*(topology.relative_speeds() for topology in found), speeds(cluster), strict=True)
    speed = max(abs(statistics.median(measured) / right - 1) for *measured, right in columns)
    return Difference(link, speed, statistics.median(seconds), shared)


def measure(cluster: Description) -> tuple[Topology, float]:
    """Build a cluster and measure it; also return the seconds that its workers took for that."""
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
    """Write the figures of a cluster beside their bars, and whether they keep them."""
    kept = (
        found.link <= LINK_BAR
        and found.speed <= SPEED_BAR
        and found.seconds <= SECONDS_BAR
        and found.shared
    )
    seen = "as they are" if found.shared else "NOT as they are"
    text = (
        f"{name:12}  links {found.link:6.1%} off (bar {LINK_BAR:.0%})   speeds {found.speed:6.1%} "
        f"off (bar {SPEED_BAR:.0%})   "
        f"{found.seconds:5.1f} s (bar {SECONDS_BAR:g} s)   shared uplinks "
        f"{seen}   {'kept' if kept else 'MISSED'}"
    )
    return text, kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--clusters",
        default=",".join(description.list_ready_clusters()),
        help="names of ready-made clusters",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="one round of two clusters, to see that it runs"
    )
    parser.add_argument("--check", action="store_true", help="end with 1 where a bar is missed")
    options = parser.parse_args()
    names = ["two-hosts", "unequal"] if options.quick else options.clusters.split(",")
    clusters = [description.ready(name) for name in names]
    kernel.seek_rights()
    found: dict[str, list[tuple[Topology, float]]] = {name: [] for name in names}
    for _ in range(1 if options.quick else options.rounds):
        for name, cluster in zip(names, clusters, strict=True):
            found[name].append(measure(cluster))
    kept = True
    for name, cluster in zip(names, clusters, strict=True):
        topologies, seconds = zip(*found[name], strict=True)
        text, good = line(name, difference(cluster, topologies, seconds))
        print(text, flush=True)
        kept = kept and good
    sys.exit(1 if options.check and not kept else 0)


if __name__ == "__main__":
    main()
