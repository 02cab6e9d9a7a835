"""Chooses the route of gradients between hosts by the measured cluster, as plain data.

links of the hosts             cores per worker         route
equally fast, < FAST_LINK      any                      auto: one copy per host crosses the
                                                        network, as without a measurement
equally fast, >= FAST_LINK     fewer than SPARE_CORES   native: copies inside of hosts would
                                                        take longer than the network
of several speeds, if the      any                      uneven: hosts with slow links send and
gain is at least MIN_GAIN                               receive less
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from paceline.comm.schedule import (
    LinkSpeed,
    Schedule,
    ScheduleNetwork,
    build_uneven,
    choose_even_schedule,
    owned_fractions,
    predict_seconds,
)

# Bytes per second. On a faster link an exchange takes longer on the processors than on the link.
FAST_LINK: Final = 250e6
# Cores per worker. With more, threads beside the training have cores of their own.
SPARE_CORES: Final = 2.0
# Fastest link / slowest link, up to which links count as equally fast. Probes aren't more exact.
ALIKE_RATIO: Final = 1.2
MIN_GAIN: Final = 1.1  # smallest predicted speed-up for which uneven chunks are used
MAX_HOSTS: Final = 32  # most hosts for uneven chunks; with more, each has too many messages at once
PRICED_BYTES: Final = 8_000_000  # bytes of the sum whose time is predicted


class RouteFacts(NamedTuple):
    """Measurements that the choice depends on."""

    rates: tuple[
        float, ...
    ]  # bytes per second of each host's link, in the order of the run's hosts
    latency: float  # seconds, of the slowest link
    cores: float  # per worker, on the host with the fewest
    source: str = "cluster.json"  # file with the measurements

    def rates_of(self, hosts: Sequence[int]) -> tuple[float, ...]:
        """Rates of all hosts of the run up to the last one in `hosts`."""
        return self.rates[: max(hosts) + 1]


class RouteChoice(NamedTuple):
    """A route, and the line that explains it."""

    way: str  # the route as in `via`; "auto" is the one without a measurement
    why: str
    parts: tuple[float, ...] = ()  # fraction of a tensor that each host owns, if uneven
    across: Schedule | None = None  # schedule between hosts, if uneven

    def to_fields(self) -> dict[str, Any]:
        """Convert the choice to plain data."""
        return {"way": self.way, "parts": list(self.parts), "why": self.why}


def choose_route(hosts: Sequence[int], facts: RouteFacts) -> RouteChoice:
    """Choose the route of gradients for ranks on these hosts.

    The choice depends on the arguments alone, so it is the same on all workers.
    """
    distinct_hosts = list(dict.fromkeys(hosts))
    if len(distinct_hosts) < 2:
        return RouteChoice(
            "auto",
            f"{facts.source} decides nothing here: workers of one host exchange through its memory",
        )
    shares_hosts = len(distinct_hosts) < len(hosts)
    rates = [facts.rates[host] for host in distinct_hosts]
    gain = _predict_gain(rates, facts.latency)
    if gain >= MIN_GAIN:
        # One chunk per host: a hierarchy already cuts tensors into chunks that follow each other,
        # so links are busy all the time.
        across = build_uneven(rates, 1 if shares_hosts else None)
        words = (
            f"links carry {_format_rates(rates)}, so slow ones get less to carry: "
            f"{gain:.2f} times as fast "
            "as even chunks"
        )
        why = (
            f"exchanges between hosts go in uneven chunks (via='uneven'): {words} ({facts.source})"
        )
        return RouteChoice("uneven", why, tuple(owned_fractions(rates)), across)
    measured = (
        f"links carry {_format_rates(rates)}, with {facts.cores:.2g} cores for each worker "
        f"({facts.source})"
    )
    if shares_hosts and min(rates) >= FAST_LINK and facts.cores < SPARE_CORES:
        return RouteChoice(
            "native", f"exchanges between hosts go between all workers (via='native'): {measured}"
        )
    return RouteChoice(
        "auto",
        (
            "exchanges between hosts go "
            f"{'as one copy per host' if shares_hosts else 'in even chunks'}: {measured}"
        ),
    )


def choose_uneven(hosts: Sequence[int], facts: RouteFacts) -> RouteChoice:
    """Build the choice for `via="uneven"`, which a script has asked for."""
    rates = [facts.rates[host] for host in dict.fromkeys(hosts)]
    return RouteChoice(
        "uneven",
        f"chunks are in proportion to links that carry {_format_rates(rates)} ({facts.source})",
        tuple(owned_fractions(rates)),
    )


def describe_route(fields: dict[str, Any] | None) -> str:
    """Describe a choice, given as plain data; None: no route was chosen."""
    if fields is None or fields["way"] == "auto":
        return "the usual way"
    parts = ", ".join(f"{part:.3g}" for part in fields["parts"])
    return f"via={fields['way']!r} with chunks of {parts}" if parts else f"via={fields['way']!r}"


def is_same_route(one: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
    """Whether two choices, given as plain data, make bit-equal sums. None: no route was chosen."""
    ways = [
        ("auto", []) if each is None else (each["way"], list(each["parts"]))
        for each in (one, other)
    ]
    return ways[0] == ways[1]


def _predict_gain(rates: Sequence[float], latency: float) -> float:
    """Speed-up of uneven chunks over the faster even schedule; 1 if links are equally fast."""
    count = len(rates)
    if count > MAX_HOSTS or max(rates) <= ALIKE_RATIO * min(rates):
        return 1.0
    links = [LinkSpeed(latency, rate) for rate in rates]
    network = ScheduleNetwork(range(count), links[0], links[0], links)
    _, even = choose_even_schedule(PRICED_BYTES, network)
    return even / predict_seconds(build_uneven(rates), PRICED_BYTES, network)


def _format_rates(rates: Sequence[float]) -> str:
    least, most = _format_rate(min(rates)), _format_rate(max(rates))
    return least if least == most else f"{least} to {most}"


def _format_rate(rate: float) -> str:
    return f"{rate * 8e-9:.2g} Gbit/s" if rate >= 125e6 else f"{rate * 8e-6:.3g} Mbit/s"
