"""Chooses the route of exchanges between hosts if a script leaves it open, as plain data.

The choice follows from links and cores of a measured cluster.

links of hosts                    cores of a worker   route
alike, below FAST                 any                 auto: one copy per host crosses the network,
                                                      as without a file
alike, FAST or above              fewer than SPARE    native: copies inside of hosts would take
                                                      longer than the network
of several speeds, if it pays     any                 uneven: hosts with slow links send and receive
                                                      less
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from paceline.comm.schedule import (
    LinkSpeed,
    Schedule,
    ScheduleNetwork,
    build_owners,
    build_ring,
    build_uneven,
    owned_fractions,
    predict_seconds,
)

# bytes a second of a link, from which on processors take longer for an exchange than it does
FAST: Final = 250e6
# cores for each worker, from which on threads beside the training have cores of their own
SPARE: Final = 2.0
# times as fast as the slowest link the fastest may be to count as alike: a probe is no more exact
ALIKE: Final = 1.2
WORTH: Final = 1.1  # times as fast as with even chunks, from which on uneven ones are taken
MOST: Final = 32  # hosts, above which each would exchange with too many at once
BUCKET: Final = 8_000_000  # bytes that are priced


class RouteFacts(NamedTuple):
    """What the choice needs: the bytes a second of each host's link, in the order of the run's
    hosts, and the longest latency (seconds).

    `cores` are those of each worker, where there are fewest; `source` says where all this is
    written.
    """

    rates: tuple[float, ...]
    latency: float
    cores: float
    source: str = "cluster.json"

    def of(self, hosts: Sequence[int]) -> tuple[float, ...]:
        """Return the rates of the run's hosts up to the last one that is among these."""
        return self.rates[: max(hosts) + 1]


class RouteChoice(NamedTuple):
    """A way, and the line that says why. "auto" is the way of runs that are given no file.

    `across`: the schedule between hosts, where that is uneven; `parts`: what each host then owns of
    a tensor.
    """

    way: str
    why: str
    parts: tuple[float, ...] = ()
    across: Schedule | None = None

    def fields(self) -> dict[str, Any]:
        """Return the choice as plain data."""
        return {"way": self.way, "parts": list(self.parts), "why": self.why}


def choose(hosts: Sequence[int], facts: RouteFacts) -> RouteChoice:
    """Choose the way of gradients for ranks on these hosts.

    The same facts give the same choice, on all workers and each time.
    """
    places = list(dict.fromkeys(hosts))
    if len(places) < 2:
        return RouteChoice(
            "auto",
            f"{facts.source} decides nothing here: workers of one host exchange through its memory",
        )
    several, rates = len(places) < len(hosts), [facts.rates[place] for place in places]
    gain = _gain(rates, facts.latency)
    if gain >= WORTH:
        # chunks of a hierarchy follow each other, so links are busy all the time
        across = build_uneven(rates, 1 if several else None)
        words = (
            f"links carry {_span(rates)}, so slow ones get less to carry: {gain:.2f} times as fast "
            "as even chunks"
        )
        why = (
            f"exchanges between hosts go in uneven chunks (via='uneven'): {words} ({facts.source})"
        )
        return RouteChoice("uneven", why, tuple(owned_fractions(rates)), across)
    each = (
        f"links carry {_span(rates)}, with {facts.cores:.2g} cores for each worker ({facts.source})"
    )
    if several and min(rates) >= FAST and facts.cores < SPARE:
        return RouteChoice(
            "native", f"exchanges between hosts go between all workers (via='native'): {each}"
        )
    return RouteChoice(
        "auto",
        (
            "exchanges between hosts go "
            f"{'as one copy per host' if several else 'in even chunks'}: {each}"
        ),
    )


def by_rates(hosts: Sequence[int], facts: RouteFacts) -> RouteChoice:
    """Return the choice of who has asked for uneven chunks."""
    rates = [facts.rates[place] for place in dict.fromkeys(hosts)]
    return RouteChoice(
        "uneven",
        f"chunks are in proportion to links that carry {_span(rates)} ({facts.source})",
        tuple(owned_fractions(rates)),
    )


def describe(fields: dict[str, Any] | None) -> str:
    """Say in some words which way the `fields` of a choice mean; None: nothing was chosen."""
    if fields is None or fields["way"] == "auto":
        return "the usual way"
    parts = ", ".join(f"{part:.3g}" for part in fields["parts"])
    return f"via={fields['way']!r} with chunks of {parts}" if parts else f"via={fields['way']!r}"


def alike(one: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
    """Whether the `fields` of two choices (None: nothing was chosen) mean the same sums, to the
    last bit.
    """
    ways = [
        ("auto", []) if each is None else (each["way"], list(each["parts"]))
        for each in (one, other)
    ]
    return ways[0] == ways[1]


def _gain(rates: Sequence[float], latency: float) -> float:
    """Speed-up of uneven chunks over the better of the even schedules; 1 if links are alike."""
    count = len(rates)
    if count > MOST or max(rates) <= ALIKE * min(rates):
        return 1.0
    links = [LinkSpeed(latency, rate) for rate in rates]
    network = ScheduleNetwork(range(count), links[0], links[0], links)
    even = min(
        predict_seconds(other, BUCKET, network)
        for other in (build_ring(count), build_owners(count))
    )
    return even / predict_seconds(build_uneven(rates), BUCKET, network)


def _span(rates: Sequence[float]) -> str:
    least, most = _mbit(min(rates)), _mbit(max(rates))
    return least if least == most else f"{least} to {most}"


def _mbit(rate: float) -> str:
    return f"{rate * 8e-9:.2g} Gbit/s" if rate >= 125e6 else f"{rate * 8e-6:.3g} Mbit/s"
