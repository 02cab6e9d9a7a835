"""Measures the links between hosts, one pair at a time in each round: at the start, for the way of buckets, and where one becomes slow."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgpack

from paceline.cluster.topology import Topology
from paceline.comm.agreement import Agreement
from paceline.comm.pairs import pairs
from paceline.session.probe.links import LONGEST, LinkMeter
from paceline.session.probe.slow_links import rounds
from paceline.sync.route_choice import RouteFacts

BRIEF, LONGEST_BRIEF = 0.03, 0.12  # seconds of a stream of one direction at the start: about, and over links of long latency
Rates = dict[tuple[int, int], float]


def measure(agreement: Agreement, cluster: Topology, stream: float, longest: float = LONGEST) -> tuple[Rates, float]:
    """Measure how many bytes a second go from each host to each other, in streams of so many seconds, and the latency. Collective.

    Streams over links of long latency take longer, `longest` at most.
    """
    first = [host.ranks[0] for host in cluster.hosts]
    connected = pairs(agreement.group, hostnames=cluster.names())
    try:
        meter = LinkMeter(connected, longest=longest)
        mine = meter.alone([[(first[a], first[b]) for a, b in each] for each in rounds(len(first))], stream)
        meter.meet()
    except BaseException:
        connected.abort()
        raise
    connected.close()
    where = cluster.where()
    told = agreement.meet("rates of links", msgpack.packb([[*each.pair, each.rate, each.latency] for each in mine]))
    found = [each for body in told for each in msgpack.unpackb(body)]
    return {(where[a], where[b]): rate for a, b, rate, _ in found}, max(latency for *_, latency in found)


def of_hosts(rates: Mapping[tuple[int, int], float]) -> tuple[float, ...]:
    """Return what the link of each host carries: the best that goes out of it or into it, whichever is less."""
    hosts = sorted({host for pair in rates for host in pair})
    out, into = ([max(rate for pair, rate in rates.items() if pair[side] == host) for host in hosts] for side in (0, 1))
    return tuple(min(pair) for pair in zip(out, into, strict=True))


def facts(agreement: Agreement, cluster: Topology) -> RouteFacts:
    """Measure what the choice of a route needs; the same on all workers. Collective."""
    began = time.perf_counter()
    rates, latency = measure(agreement, cluster, BRIEF, LONGEST_BRIEF)
    cores = min(host.cores / len(host.ranks) for host in cluster.hosts)
    told = agreement.meet("cores of workers", msgpack.packb([cores, time.perf_counter() - began]))
    mine = [msgpack.unpackb(body) for body in told]
    return RouteFacts(of_hosts(rates), latency, min(each[0] for each in mine), max(each[1] for each in mine))
