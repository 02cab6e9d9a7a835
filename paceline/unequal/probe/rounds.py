"""The order of measurements, as plain data: workers that would disturb each other take turns.

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
Pair = tuple[int, int]  # the rank that sends, and the one that receives
ALL_PAIRS = 8  # workers of a host of which every pair is measured; of more, neighbours alone


def plan_compute_waves(topology: Topology) -> list[list[int]]:
    """Hosts that may compute at the same time: one of each machine.

    Hosts of a lab, or containers, share a machine's cores. All workers of a host compute together,
    as they do in training.
    """
    machines: dict[str, list[int]] = {}
    for index, host in enumerate(topology.hosts):
        machines.setdefault(host.machine or f"{index}", []).append(index)
    return _interleave_columns(machines.values())


def plan_inside_rounds(topology: Topology) -> list[list[Pair]]:
    """Rounds in which one worker of a host sends to another, at most one on each machine."""
    rounds = []
    for wave in plan_compute_waves(topology):
        rounds += _interleave_columns(_list_pairs(topology.hosts[host]) for host in wave)
    return rounds


def plan_crowded_inside(topology: Topology) -> list[list[Pair]]:
    """Return rounds in which each worker of a host sends to the next one there."""
    rounds = [
        [pair for host in wave for pair in _make_ring(topology.hosts[host])]
        for wave in plan_compute_waves(topology)
    ]
    return [pairs for pairs in rounds if pairs]


def plan_between_rounds(topology: Topology) -> list[list[Pair]]:
    """Rounds in which the first worker of one host sends to another host, and all others rest."""
    return [[(one.ranks[0], other.ranks[0])] for one, other in permutations(topology.hosts, 2)]


def plan_crowded_between(topology: Topology) -> list[list[Pair]]:
    """Rounds in which each host sends to one host and receives from one.

    The rate that links lose then is shared between them.
    """
    first = [host.ranks[0] for host in topology.hosts]
    count = len(first)
    if count < 3:  # two hosts that send to each other share no more than the link that they are
        return []
    return [
        [(first[host], first[(host + shift) % count]) for host in range(count)]
        for shift in range(1, count)
    ]


def _list_pairs(host: HostRanks) -> list[Pair]:
    if len(host.ranks) <= ALL_PAIRS:
        return list(permutations(host.ranks, 2))
    ring = _make_ring(host)
    return ring + [(target, source) for source, target in ring]


def _make_ring(host: HostRanks) -> list[Pair]:
    count = len(host.ranks)
    return (
        [(host.ranks[place], host.ranks[(place + 1) % count]) for place in range(count)]
        if count > 1
        else []
    )


def _interleave_columns(columns: Iterable[list[T]]) -> list[list[T]]:
    """Return the first of each list, then the second of each that has one, and so on."""
    rows = zip_longest(*([[each] for each in column] for column in columns), fillvalue=list[T]())
    return [[each for cell in row for each in cell] for row in rows]
