"""Which way buckets travel where a script leaves it open: decided by the measured links of hosts, and by their cores, as plain data.

links of hosts                                  cores of a worker       way
alike, below FAST                               any                     hierarchical: one copy per host crosses the network
alike, FAST or above                            fewer than SPARE        native: what is copied inside of hosts takes longer than the network
of several speeds, for which it pays            any                     uneven: hosts with slow links send and receive less
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from paceline.comm.schedule import LinkSpeed, Schedule, ScheduleNetwork, owners, ring, seconds, uneven

FAST: Final = 250e6  # bytes a second of a link, from which on processors take longer for an exchange than it does
SPARE: Final = 2.0  # cores for each worker, from which on threads beside the training have cores of their own
WORTH: Final = 1.1  # times as fast as with even chunks, from which on uneven ones are taken
BUCKET: Final = 8_000_000  # bytes that are priced


class RouteFacts(NamedTuple):
    """What is known before buckets travel: the bytes a second and the latency of each host's link, in the order of hosts, and the cores
    of each worker where there are fewest. `seconds`: what measuring took.
    """

    rates: tuple[float, ...]
    latency: float
    cores: float
    seconds: float


class RouteChoice(NamedTuple):
    """A way, and the line that says why. `across`: the schedule between hosts, where that is uneven."""

    name: str
    why: str
    across: Schedule | None = None


def choose(hosts: Sequence[int], facts: RouteFacts) -> RouteChoice:
    """Choose the way of buckets for ranks on these hosts. All workers are given the same, so all choose the same."""
    several = len(set(hosts)) < len(hosts)
    took = f"links measured in {facts.seconds:.2f} s"
    gain = _gain(facts)
    if gain >= WORTH:
        across = uneven(facts.rates, 1 if several else None)  # chunks of a hierarchy follow each other, so links are busy all the time
        slowest, fastest = min(facts.rates), max(facts.rates)
        words = f"links carry {_mbit(slowest)} to {_mbit(fastest)}, so slow ones get less to carry: {gain:.2f} times as fast as even chunks"
        return RouteChoice("uneven", f"buckets travel by via='uneven': {words} ({took})", across)
    each = f"links carry {_mbit(min(facts.rates))}, with {facts.cores:g} cores for each worker ({took})"
    if several and min(facts.rates) >= FAST and facts.cores < SPARE:
        return RouteChoice("native", f"buckets travel by via='native': {each}")
    return RouteChoice("hierarchical" if several else "native", f"buckets travel by via='{'auto' if several else 'native'}': {each}")


def _gain(facts: RouteFacts) -> float:
    """Return how many times as fast uneven chunks are as the better of even schedules."""
    count = len(facts.rates)
    links = [LinkSpeed(facts.latency, rate) for rate in facts.rates]
    network = ScheduleNetwork(range(count), links[0], links[0], links)
    even = min(seconds(other, BUCKET, network) for other in (ring(count), owners(count)))
    return even / seconds(uneven(facts.rates), BUCKET, network)


def _mbit(rate: float) -> str:
    return f"{rate * 8e-9:.2g} Gbit/s" if rate >= 125e6 else f"{rate * 8e-6:.3g} Mbit/s"
