"""Plans the order of measurements: workers that would disturb each other take turns.

Workers that compute side by side in training are measured side by side.

hosts a, b on one machine, c on another       waves:  a, c | b
links between hosts, alone                    rounds: a>b | a>c | b>a | b>c | c>a | c>b
all hosts at once                             rounds: a>b b>c c>a | a>c b>a c>b
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import permutations, zip_longest
from typing import TypeVar

from paceline.cluster.topology import HostRanks, Topology

T = TypeVar("T")
Pair = tuple[int, int]  # the rank that sends, and the rank that receives
# Hosts with up to this many workers have all pairs measured, larger hosts only neighbours.
ALL_PAIRS = 8


def plan_compute_waves(topology: Topology) -> list[list[int]]:
    """Plan waves of hosts that may compute at the same time: one host of each machine.

    Hosts of a lab, and containers, share the cores of a machine. All workers of a host compute
    together, as they do in training.
    """
    # A host whose machine is unknown counts as a machine of its own.
    machines: dict[str, list[int]] = {}
    for index, host in enumerate(topology.hosts):
        machines.setdefault(host.machine or f"{index}", []).append(index)
    return _interleave_columns(machines.values())


def plan_inside_rounds(topology: Topology) -> list[list[Pair]]:
    """Plan rounds in which one worker of a host sends to another, one pair on each machine."""
    rounds = []
    for wave in plan_compute_waves(topology):
        rounds += _interleave_columns(_list_pairs(topology.hosts[host]) for host in wave)
    return rounds


def plan_crowded_inside(topology: Topology) -> list[list[Pair]]:
    """Plan rounds in which each worker of a host sends to the next one of that host."""
    rounds = [
        [pair for host in wave for pair in _make_ring(topology.hosts[host])]
        for wave in plan_compute_waves(topology)
    ]
    return [pairs for pairs in rounds if pairs]


def plan_between_rounds(topology: Topology) -> list[list[Pair]]:
    """Plan rounds in which the first worker of one host sends to another, and all others rest."""
    return [[(one.ranks[0], other.ranks[0])] for one, other in permutations(topology.hosts, 2)]


def plan_crowded_between(topology: Topology) -> list[list[Pair]]:
    """Plan rounds in which each host sends to one host and receives from one.

    If links are slower in such a round than alone, they share a switch or an uplink.
    """
    first = [host.ranks[0] for host in topology.hosts]
    count = len(first)
    # Two hosts have nothing to share but the link between them.
    if count < 3:
        return []
    return [
        [(first[host], first[(host + shift) % count]) for host in range(count)]
        for shift in range(1, count)
    ]


def _list_pairs(host: HostRanks) -> list[Pair]:
    """Pairs of workers of a host that are measured, in both directions."""
    if len(host.ranks) <= ALL_PAIRS:
        return list(permutations(host.ranks, 2))
    ring = _make_ring(host)
    return ring + [(target, source) for source, target in ring]


def _make_ring(host: HostRanks) -> list[Pair]:
    """Pairs of each worker of a host with the next one; empty for a single worker."""
    count = len(host.ranks)
    return (
        [(host.ranks[place], host.ranks[(place + 1) % count]) for place in range(count)]
        if count > 1
        else []
    )


def _interleave_columns(columns: Iterable[list[T]]) -> list[list[T]]:
    """Make rows: the first items of all lists, then the second items of longer lists, and so on."""
    rows = zip_longest(*([[each] for each in column] for column in columns), fillvalue=list[T]())
    return [[each for cell in row for each in cell] for row in rows]
