"""Detects links between hosts that become slow during a run, as plain data.

Exchange of a step in ms, on the last worker, which never waits:

    4   4   5   4 | 21  22  20  23     usual: 4

    twice as long, for a fifth of a step, in four of five flushes         measure the links
    four times as long, for a third of a step, in two steps in a row      measure them at once

Bytes a second:

                 to host0  host1  host2
    from host0         -     120     12      the best rate out of host2, and into it, is far below
         host1       120       -     12      the others' best: host2 is named. Of two hosts both are
         host2        12      12      -      named, as it can't be known which is slow.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from paceline.trace import STEP_PARTS

# the least that is looked at; flushes of fewer steps than four are taken together
FLUSHES, STEPS = 5, 20
# as long as usual; of a step; seconds of it: from which on links are measured
TIMES, SHARE, LEAST = 2.0, 0.2, 1e-3
TIMES_AT_ONCE, SHARE_AT_ONCE = 4.0, 0.3  # the same, for two steps that have links measured at once
# seconds from one look at the last two steps to the next; after a look that found no slow link
GLANCE, PAUSE = 0.2, 60.0
SLOW: Final = 0.5  # of the usual rate: slower is slow
MOST_PARTNERS: Final = 15  # hosts that each one is measured with
_EXCHANGE = STEP_PARTS.index("exchange")
_BUSY = [STEP_PARTS.index(part) for part in ("compute", "data")]


class Slowdown(NamedTuple):
    """Exchanges take longer than before: their seconds, those of a step, and the longest own
    work.
    """

    usual: float
    now: float
    step: float
    busy: float


class _StepSeconds(NamedTuple):
    """What steps in the mean, or one, have of all workers: seconds of exchange of the one that
    waits least, of a step, of the busiest.
    """

    steps: int
    exchange: float
    whole: float
    busy: float


class ExchangeSensor:
    """Follows the exchanges of all workers, with the same answers on all of them: `take` and
    `glance` return a slowdown, once.

    `ahead`: in how many steps from now a glance is worth its meeting; None before anything is
    usual, and while exchanges are slow.
    """

    def __init__(self) -> None:
        self._ahead: int | None = None
        self._names: tuple[int, ...] = ()
        self._flushes: deque[_StepSeconds] = deque(maxlen=FLUSHES)
        self._open: list[_StepSeconds] = []  # flushes of a few steps each, as steps take long
        self._usual: float | None = None
        self.slow = False

    def take_flush(
        self, names: Sequence[int], steps: Sequence[Sequence[Sequence[float]]]
    ) -> Slowdown | None:
        """Take in the seconds of PARTS of each step since the last flush, by rank.

        All begins anew when the workers change.
        """
        if tuple(names) != self._names:
            self._names, self._usual, self.slow, self._ahead = tuple(names), None, False, None
            self._flushes.clear()
            self._open.clear()
        if len(steps) < 2 or not all(steps):
            return None
        self._open.append(
            _summarize_steps(
                [[sum(part) / len(mine) for part in zip(*mine, strict=True)] for mine in steps],
                len(steps[0]),
            )
        )
        if self._ahead is None:
            self._ahead = _choose_steps(GLANCE, self._open[-1].whole)
        if (count := sum(flush.steps for flush in self._open)) < STEPS // FLUSHES:
            return None
        exchange, whole, busy = (
            sum(flush.steps * flush[at] for flush in self._open) / count for at in (1, 2, 3)
        )
        self._flushes.append(_StepSeconds(count, exchange, whole, busy))
        self._open.clear()
        return self._judge_flushes() if len(self._flushes) == FLUSHES else None

    @property
    def steps_ahead(self) -> int | None:
        return None if self._usual is None or self.slow else self._ahead

    def glance_at_steps(self, last: Sequence[Sequence[Sequence[float]]]) -> Slowdown | None:
        """Look at the seconds of PARTS of the last two steps, by rank.

        Flushes are seconds apart once steps are ten times as long, so waiting for one would take
        too long.
        """
        assert self._usual is not None
        looks = [_summarize_steps(each) for each in zip(*last, strict=True)]
        self._ahead = _choose_steps(GLANCE, max(look.whole for look in looks))
        if any(
            look.exchange < max(TIMES_AT_ONCE * self._usual, SHARE_AT_ONCE * look.whole, LEAST)
            for look in looks
        ):
            return None
        _, exchange, whole, busy = map(statistics.fmean, zip(*looks, strict=True))
        return Slowdown(self._usual, exchange, whole, busy)

    def note_examination(self, slowdown: Slowdown, *, found: bool) -> None:
        """Take note of whether a link was found to be slow, for which a glance was the reason."""
        self.slow = found
        self._ahead = None if found else _choose_steps(PAUSE, slowdown.step)
        if found:
            self._flushes.clear()  # most are of before
            self._open.clear()

    def _judge_flushes(self) -> Slowdown | None:
        columns = sorted(flush.exchange for flush in self._flushes)
        now, sure = statistics.median(columns), columns[FLUSHES // 5]
        step = statistics.median(flush.whole for flush in self._flushes)
        usual = self._usual = now if self._usual is None else min(self._usual, now)
        if not self.slow and sure > TIMES * usual and sure - usual > max(LEAST, SHARE * step):
            self.slow = True
            # and not those from before
            slow = [flush for flush in self._flushes if flush.exchange > TIMES * usual]
            _, exchange, whole, busy = map(statistics.median, zip(*slow, strict=True))
            return Slowdown(usual, exchange, whole, busy)
        if now < (TIMES / 2 + 0.5) * usual + LEAST:
            self.slow = False
        return None


def _summarize_steps(seconds: Sequence[Sequence[float]], steps: int = 1) -> _StepSeconds:
    """Look at the seconds of PARTS of each rank.

    The last worker, which waits for nobody, has the least of exchange.
    """
    exchange, whole = min(mine[_EXCHANGE] for mine in seconds), max(map(sum, seconds))
    return _StepSeconds(
        steps, exchange, whole, max(sum(mine[at] for at in _BUSY) for mine in seconds)
    )


def _choose_steps(seconds: float, step: float) -> int:
    return max(1, int(seconds / max(step, 1e-9)))


class SlowLink(NamedTuple):
    """Result of a measurement: hosts with slow links, their rate, and the usual rate.

    It names two hosts if the link between them is the slow one.
    """

    hosts: tuple[int, ...]
    rate: float  # bytes a second
    usual: float | None  # of the other links; None where there is no other


def plan_rounds(count: int) -> list[list[tuple[int, int]]]:
    """Rounds of pairs of hosts (source, target) in which each host takes part once.

    Each pair is there in both directions.
    """
    ring = [*range(count), *[-1] * (count % 2)]  # -1: nobody
    found = []
    for _ in range(min(len(ring) - 1, MOST_PARTNERS)):
        half = len(ring) // 2
        pairs = [
            pair for pair in zip(ring[:half], reversed(ring[half:]), strict=True) if -1 not in pair
        ]
        found += [pairs, [(target, source) for source, target in pairs]]
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return [pairs for pairs in found if pairs]


def find_slow_links(rates: Mapping[tuple[int, int], float]) -> SlowLink | None:
    """Find the hosts whose links are slow among these rates, (source, target) -> bytes a second;
    None if none stands out.

    Of two hosts it is always the link between them: there is no other to compare it with.
    """
    hosts = sorted({host for pair in rates for host in pair})
    if len(hosts) == 2:
        return SlowLink((hosts[0], hosts[1]), min(rates.values()), None)
    out, into = (
        [max(rate for pair, rate in rates.items() if pair[side] == host) for host in hosts]
        for side in (0, 1)
    )
    usual = statistics.median([*out, *into])
    best = [min(pair) for pair in zip(out, into, strict=True)]
    slow = tuple(host for host, rate in zip(hosts, best, strict=True) if rate < SLOW * usual)
    if slow:
        return SlowLink(slow, min(best), usual)
    # one link, between two hosts whose others are fine
    pair, rate = min(rates.items(), key=lambda item: item[1])
    return SlowLink((min(pair), max(pair)), rate, usual) if rate < SLOW * usual else None


class CodecCost(NamedTuple):
    """Bytes of a codec as a part of exact sums, and its processor seconds for an element."""

    sent: float
    seconds: float


def predict_speedup(
    slowdown: Slowdown, nbytes: float, rate: float, elements: float, codec: CodecCost
) -> float:
    """Predict the speed-up of steps by a codec, for a host with a slow link.

    The host sends `nbytes` for `elements` in a step. Time that the link saves is taken off the
    step, which doesn't become shorter than the busiest worker's own work. Coding takes the
    processor from the model, so all of its time is added.
    """
    saved = (1 - codec.sent) * nbytes / rate
    return slowdown.step / (max(slowdown.step - saved, slowdown.busy) + codec.seconds * elements)
