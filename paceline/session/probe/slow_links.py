"""Links between hosts that become slow while a run is under way: when to look, and what was found, as plain data.

exchange of a step, ms        4   4   5   4 | 21  22  20  23     what even the last worker, which never waits, spends in exchanges:
                              usual, 4      | twice as long, for a fifth of a step, in four of five flushes: measure the links

bytes a second    to host0  host1  host2      the best way out of host2, and into it, is far below that of the others:
from host0            -      120    12        host2 is named; of two hosts it can't be known which, and both are
     host1           120      -     12
     host2            12      12     -
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from paceline.session.record.folder import PARTS

FLUSHES, STEPS = 5, 20  # the least that is looked at; flushes of fewer steps than four are taken together
TIMES, SHARE, LEAST = 2.0, 0.2, 1e-3  # as long as usual; of a step; seconds of it: from which on links are measured
SLOW: Final = 0.5  # of the usual rate: slower is slow
MOST_PARTNERS: Final = 15  # hosts that each one is measured with
_EXCHANGE = PARTS.index("exchange")


class Slowdown(NamedTuple):
    """Exchanges take longer than before: seconds of a step, and those of a whole step now."""

    usual: float
    now: float
    step: float


class ExchangeSensor:
    """Follows the exchanges of all workers, with the same answers on all of them: `take` returns a slowdown, once."""

    def __init__(self) -> None:
        self._names: tuple[int, ...] = ()
        self._flushes: deque[tuple[int, float, float]] = deque(maxlen=FLUSHES)  # steps; seconds of exchange, and of a step, in the mean
        self._open: list[tuple[int, float, float]] = []  # flushes of a few steps each, as steps take long
        self._usual: float | None = None
        self.slow = False

    def take(self, names: Sequence[int], steps: Sequence[Sequence[Sequence[float]]]) -> Slowdown | None:
        """Take in the seconds of PARTS of each step since the last flush, by rank. All begins anew when the workers change."""
        if tuple(names) != self._names:
            self._names, self._usual, self.slow = tuple(names), None, False
            self._flushes.clear()
            self._open.clear()
        if len(steps) < 2 or not all(steps):
            return None
        exchange = min(sum(step[_EXCHANGE] for step in mine) / len(mine) for mine in steps)
        whole = max(sum(map(sum, mine)) / len(mine) for mine in steps)
        self._open.append((len(steps[0]), exchange, whole))
        if (count := sum(count for count, _, _ in self._open)) < STEPS // FLUSHES:
            return None
        exchange, whole = (sum(flush[0] * flush[at] for flush in self._open) / count for at in (1, 2))
        self._flushes.append((count, exchange, whole))
        self._open.clear()
        return self._judge() if len(self._flushes) == FLUSHES else None

    def _judge(self) -> Slowdown | None:
        columns = sorted(exchange for _, exchange, _ in self._flushes)
        now, sure = statistics.median(columns), columns[FLUSHES // 5]
        step = statistics.median(whole for _, _, whole in self._flushes)
        usual = self._usual = now if self._usual is None else min(self._usual, now)
        if not self.slow and sure > TIMES * usual and sure - usual > max(LEAST, SHARE * step):
            self.slow = True
            slow = [flush for flush in self._flushes if flush[1] > TIMES * usual]  # and not those from before
            return Slowdown(usual, statistics.median(flush[1] for flush in slow), statistics.median(flush[2] for flush in slow))
        if now < (TIMES / 2 + 0.5) * usual + LEAST:
            self.slow = False
        return None


class SlowLink(NamedTuple):
    """What the measurement has found: the hosts whose links are slow (two, where it is the one between them), their rate, and the usual."""

    hosts: tuple[int, ...]
    rate: float  # bytes a second
    usual: float | None  # of the other links; None where there is no other


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs of hosts, (source, target), in which each host takes part once; each pair is there in both directions."""
    ring = [*range(count), *[-1] * (count % 2)]  # -1: nobody
    found = []
    for _ in range(min(len(ring) - 1, MOST_PARTNERS)):
        half = len(ring) // 2
        pairs = [pair for pair in zip(ring[:half], reversed(ring[half:]), strict=True) if -1 not in pair]
        found += [pairs, [(target, source) for source, target in pairs]]
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return [pairs for pairs in found if pairs]


def find(rates: Mapping[tuple[int, int], float]) -> SlowLink | None:
    """Find the hosts whose links are slow among these rates, (source, target) -> bytes a second; None if none stands out.

    Of two hosts it is always the link between them: there is no other to compare it with.
    """
    hosts = sorted({host for pair in rates for host in pair})
    if len(hosts) == 2:
        return SlowLink((hosts[0], hosts[1]), min(rates.values()), None)
    out, into = ([max(rate for pair, rate in rates.items() if pair[side] == host) for host in hosts] for side in (0, 1))
    usual = statistics.median([*out, *into])
    best = [min(pair) for pair in zip(out, into, strict=True)]
    slow = tuple(host for host, rate in zip(hosts, best, strict=True) if rate < SLOW * usual)
    if slow:
        return SlowLink(slow, min(best), usual)
    pair, rate = min(rates.items(), key=lambda item: item[1])  # one link, between two hosts whose others are fine
    return SlowLink((min(pair), max(pair)), rate, usual) if rate < SLOW * usual else None


class CodecCost(NamedTuple):
    """What a codec sends, as a part of what exact sums send, and the seconds of a processor for an element."""

    sent: float
    seconds: float


def predict(slowdown: Slowdown, nbytes: float, rate: float, elements: float, codec: CodecCost) -> float:
    """Predict how many times as fast steps are with a codec, where a host sends so many bytes of `elements` in a step over its slow link.

    What the link has less to do is taken off what shows of the exchange; coding takes the processor from the model, so all of it is added.
    """
    link = nbytes / rate
    shown = max(slowdown.now - (1 - codec.sent) * link, 0.0) + codec.seconds * elements
    return slowdown.step / (slowdown.step - slowdown.now + shown)
