"""Detects links between hosts that become slow during a run, from plain data.

Exchange of a step in ms, on the last worker to come to it, which doesn't wait for others:

    4   4   5   4 | 21  22  20  23     usual: 4

    twice as long, for a fifth of a step, in four of five flushes         measure the links
    four times as long, for a third of a step, in two steps in a row      measure them at once

Rates of links:

                 to host0  host1  host2
    from host0         -     120     12      the best rates out of host2 and into it are far below
         host1       120       -     12      those of other hosts: host2 is named. With only two
         host2        12      12      -      hosts, both are named, as either may be the slow one.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from paceline.trace import STEP_PARTS

# number of flushes, and of their steps, that are judged; shorter flushes are merged
FLUSHES, STEPS = 5, 20
# An exchange is slow if it takes this many times as long as usual, and longer than usual by this
# part of a step and this many seconds.
TIMES, SHARE, LEAST = 2.0, 0.2, 1e-3
# The same for a glance at two steps: times as long as usual, and the part of a step that it takes.
TIMES_AT_ONCE, SHARE_AT_ONCE = 4.0, 0.3
# seconds from one glance to the next, and after a glance that led to no slow link
GLANCE, PAUSE = 0.2, 60.0
SLOW: Final = 0.5  # part of the usual rate below which a link is slow
MOST_PARTNERS: Final = 15  # hosts that each host is measured with, about
_EXCHANGE = STEP_PARTS.index("exchange")
_BUSY = [STEP_PARTS.index(part) for part in ("compute", "data")]


class Slowdown(NamedTuple):
    """Exchanges that take longer than before; all values are seconds in a step."""

    usual: float  # exchange before
    now: float  # exchange now
    step: float  # whole step now
    busy: float  # own work of the busiest worker


class _StepSeconds(NamedTuple):
    """Seconds of one step, or of a mean step, over all workers."""

    steps: int  # number of steps in the mean
    exchange: float  # of the worker that waits least
    whole: float  # of the longest step
    busy: float  # own work of the busiest worker


class ExchangeSensor:
    """Follows the exchanges of all workers, and reports each slowdown once.

    Its answers are the same on all workers with the same input.

    Invariants: `_usual` is None until there are enough flushes, and never grows for the same
    workers. `slow` is set from the report of a slowdown until exchanges are short again.
    """

    def __init__(self) -> None:
        self._ahead: int | None = None
        self._names: tuple[int, ...] = ()
        self._flushes: deque[_StepSeconds] = deque(maxlen=FLUSHES)
        # Flushes with too few steps to be judged, if steps take long: they wait to be merged.
        self._open: list[_StepSeconds] = []
        self._usual: float | None = None
        self.slow = False

    def take_flush(
        self, names: Sequence[int], steps: Sequence[Sequence[Sequence[float]]]
    ) -> Slowdown | None:
        """Take in the steps of all workers since the last flush.

        Args:
            names: Number of each worker in the run; other numbers discard all earlier flushes.
            steps: Seconds of STEP_PARTS, by rank and step.

        Returns:
            A slowdown if exchanges have just become slow; else None.
        """
        if tuple(names) != self._names:
            self._names, self._usual, self.slow, self._ahead = tuple(names), None, False, None
            self._flushes.clear()
            self._open.clear()
        if len(steps) < 2 or not all(steps):
            return None
        self._open.append(
            _summarize_steps(
                [
                    [sum(part) / len(rank_steps) for part in zip(*rank_steps, strict=True)]
                    for rank_steps in steps
                ],
                len(steps[0]),
            )
        )
        if self._ahead is None:
            self._ahead = _choose_steps(GLANCE, self._open[-1].whole)

        # Merge flushes until they have enough steps; each counts by its steps.
        if (count := sum(flush.steps for flush in self._open)) < STEPS // FLUSHES:
            return None
        exchange, step, busy = (
            sum(flush.steps * flush[field] for flush in self._open) / count for field in (1, 2, 3)
        )
        self._flushes.append(_StepSeconds(count, exchange, step, busy))
        self._open.clear()
        return self._judge_flushes() if len(self._flushes) == FLUSHES else None

    @property
    def steps_ahead(self) -> int | None:
        """Number of steps until a glance is worth its meeting.

        None until it is known what is usual, and while exchanges are slow.
        """
        return None if self._usual is None or self.slow else self._ahead

    def glance_at_steps(self, last: Sequence[Sequence[Sequence[float]]]) -> Slowdown | None:
        """Judge the last two steps alone.

        When steps become ten times as long, the next flush is many seconds away; a glance doesn't
        wait for it.

        Args:
            last: Seconds of STEP_PARTS, by rank and step.

        Returns:
            A slowdown if both steps have very slow exchanges; else None.
        """
        assert self._usual is not None
        summaries = [_summarize_steps(each) for each in zip(*last, strict=True)]
        self._ahead = _choose_steps(GLANCE, max(step.whole for step in summaries))
        # Both steps have to be slow, as a single one may be a short disturbance.
        if any(
            step.exchange < max(TIMES_AT_ONCE * self._usual, SHARE_AT_ONCE * step.whole, LEAST)
            for step in summaries
        ):
            return None
        _, exchange, mean_step, busy = map(statistics.fmean, zip(*summaries, strict=True))
        return Slowdown(self._usual, exchange, mean_step, busy)

    def note_examination(self, slowdown: Slowdown, *, found: bool) -> None:
        """Note whether the measurement after a glance has found a slow link."""
        self.slow = found
        self._ahead = None if found else _choose_steps(PAUSE, slowdown.step)
        # Most flushes are from before the slowdown, and would call exchanges short again.
        if found:
            self._flushes.clear()
            self._open.clear()

    def _judge_flushes(self) -> Slowdown | None:
        """Compare the last flushes with the usual exchange."""
        # `sure` is reached in four of five flushes.
        exchanges = sorted(flush.exchange for flush in self._flushes)
        now, sure = statistics.median(exchanges), exchanges[FLUSHES // 5]
        step = statistics.median(flush.whole for flush in self._flushes)

        # The shortest exchange so far is the usual one, so that slow links don't become usual.
        usual = self._usual = now if self._usual is None else min(self._usual, now)
        if not self.slow and sure > TIMES * usual and sure - usual > max(LEAST, SHARE * step):
            self.slow = True
            # Leave out the flush from before the slowdown, if there is one.
            slow = [flush for flush in self._flushes if flush.exchange > TIMES * usual]
            _, exchange, slow_step, busy = map(statistics.median, zip(*slow, strict=True))
            return Slowdown(usual, exchange, slow_step, busy)
        # The limit back is lower than the limit up, so that `slow` doesn't flicker.
        if now < (TIMES / 2 + 0.5) * usual + LEAST:
            self.slow = False
        return None


def _summarize_steps(seconds: Sequence[Sequence[float]], steps: int = 1) -> _StepSeconds:
    """Summarize the seconds of STEP_PARTS of each rank, in a step or a mean of `steps`."""
    # The last worker to come to an exchange doesn't wait, so its exchange is the shortest.
    exchange, longest = min(row[_EXCHANGE] for row in seconds), max(map(sum, seconds))
    busy = max(sum(row[index] for index in _BUSY) for row in seconds)
    return _StepSeconds(steps, exchange, longest, busy)


def _choose_steps(seconds: float, step: float) -> int:
    """Number of steps of `step` seconds in a number of seconds; at least 1."""
    return max(1, int(seconds / max(step, 1e-9)))


class SlowLink(NamedTuple):
    """Hosts with slow links, by a measurement.

    It has two hosts if only the link between them is slow.
    """

    hosts: tuple[int, ...]
    rate: float  # of the slow links, in bytes per second
    usual: float | None  # rate of the other links; None if there are no others


def plan_rounds(count: int) -> list[list[tuple[int, int]]]:
    """Plan rounds of pairs of hosts (source, target) with each host at most once in a round.

    Each pair is measured in both directions, in two rounds. With more than MOST_PARTNERS + 1 hosts,
    some pairs are left out.
    """
    # The circle method of tournaments: the first host stays in its place, and the others rotate
    # by one place after each round. The partner of -1 rests.
    ring = [*range(count), *[-1] * (count % 2)]
    rounds = []
    for _ in range(min(len(ring) - 1, MOST_PARTNERS)):
        half = len(ring) // 2
        pairs = [
            pair for pair in zip(ring[:half], reversed(ring[half:]), strict=True) if -1 not in pair
        ]
        rounds += [pairs, [(target, source) for source, target in pairs]]
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return [pairs for pairs in rounds if pairs]


def find_slow_links(rates: Mapping[tuple[int, int], float]) -> SlowLink | None:
    """Find hosts whose links are slow; None if all rates are alike.

    With two hosts, it is always the link between them, as there is no other to compare it with.

    Args:
        rates: Rate for each (source, target), in bytes per second.
    """
    hosts = sorted({host for pair in rates for host in pair})
    if len(hosts) == 2:
        return SlowLink((hosts[0], hosts[1]), min(rates.values()), None)

    # The best rate of a host is limited by its own link, the others also by its partners' links.
    out, into = (
        [max(rate for pair, rate in rates.items() if pair[side] == host) for host in hosts]
        for side in (0, 1)
    )
    usual = statistics.median([*out, *into])
    best = [min(pair) for pair in zip(out, into, strict=True)]
    slow = tuple(host for host, rate in zip(hosts, best, strict=True) if rate < SLOW * usual)
    if slow:
        return SlowLink(slow, min(best), usual)

    # No host is slow as a whole: look for a single link, between hosts whose other links are fine.
    pair, rate = min(rates.items(), key=lambda item: item[1])
    return SlowLink((min(pair), max(pair)), rate, usual) if rate < SLOW * usual else None


class CodecCost(NamedTuple):
    """Cost of a codec."""

    sent: float  # its bytes, as a part of the bytes of exact sums
    seconds: float  # processor seconds per element


def predict_speedup(
    slowdown: Slowdown, nbytes: float, rate: float, elements: float, codec: CodecCost
) -> float:
    """Predict how many times as fast steps become by a codec, for a host with a slow link.

    Args:
        slowdown: Seconds of the present steps.
        nbytes: Bytes that the host sends in a step.
        rate: Rate of its link in bytes per second.
        elements: Number of elements that are summed in a step.
        codec: Cost of the codec.
    """
    # The step becomes shorter by the time that the link saves, but not shorter than the own work
    # of the busiest worker. Coding takes the processor from the model: all of its time is added.
    saved = (1 - codec.sent) * nbytes / rate
    return slowdown.step / (max(slowdown.step - saved, slowdown.busy) + codec.seconds * elements)
