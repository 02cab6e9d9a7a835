"""Finds slow links: measures the links between hosts once exchanges take longer than before.

It measures while no step is under way.

flush   flush   flush (slow for long enough)              flush
  |  :  :  |  :  :  | rounds of pairs of hosts,             | the line, the status line,
     |                a few 100 KB each                       `links` of the summary
     a glance: have the last two steps become slow at once?
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgpack
import torch

from paceline.codec.coding import count_message_bytes, make_message
from paceline.codec.dense import int8
from paceline.comm.pairs import connect_pairs
from paceline.errors import PacelineError
from paceline.formatting import format_as_call
from paceline.loop.turns import TrainingLoop
from paceline.record.history import RunHistory
from paceline.sync.base import Strategy
from paceline.trace import STEP_PARTS
from paceline.unequal.probe.links import LinkMeter
from paceline.unequal.probe.slow_links import (
    CodecCost,
    ExchangeSensor,
    Slowdown,
    SlowLink,
    find_slow_links,
    plan_rounds,
    predict_speedup,
)
from paceline.workers.axes import RunAxes

STREAM: Final = 0.08  # seconds of a stream of one direction, about
TRIED: Final = 1 << 20  # elements that are coded for the prediction
EXPLAINS: Final = 0.5  # of the exchange that a link has to take to be the reason
WORTH: Final = 1.1  # times as fast, from which on a codec is advised


class LinkWatch:
    """One worker's part in watching the links of a run on several hosts, in lockstep."""

    def __init__(
        self,
        loop: TrainingLoop,
        axes: RunAxes,
        strategy: Strategy,
        history: RunHistory,
        *,
        survives: bool,
    ) -> None:
        self._loop, self._axes, self._strategy, self._history, self._survives = (
            loop,
            axes,
            strategy,
            history,
            survives,
        )
        self._sensor = ExchangeSensor()
        self._last: deque[list[float]] = deque(maxlen=2)  # seconds of PARTS of my last steps
        self._next: int | None = None  # the step after which all meet for a glance
        # steps, and bytes sent between hosts, at the last flushes
        self._marks: deque[tuple[int, int]] = deque(maxlen=2)
        self._remark = ""
        self.slow_links: list[dict[str, Any]] = []

    @property
    def status_remark(self) -> str:
        """What the status line says of links, as long as exchanges are slow."""
        return self._remark if self._sensor.slow else ""

    def take_flush(self, names: Sequence[int], steps: Sequence[Sequence[Sequence[float]]]) -> None:
        """Take in the seconds of PARTS of all steps since the last flush, by rank. Collective.

        The input is the same on all workers.
        """
        if self._axes.cut_axes or len(self._axes.cluster().hosts) < 2:
            return
        self._marks.append((self._loop.steps_made, self._loop.clock.sent.between))
        slowdown = self._sensor.take_flush(names, steps)
        if slowdown is not None:
            self._examine_links(slowdown)
        if self._next is None or self._sensor.steps_ahead is None:
            self._plan_glance()

    def step_ended(self, step: int, _samples: int, seconds: Mapping[str, float]) -> None:
        """Take in the seconds of a step of this worker, and compare the last two if it is time.

        Collective in that case.
        """
        self._last.append([seconds.get(part, 0.0) for part in STEP_PARTS])
        if self._next is None or step < self._next:
            return
        told = self._axes.everyone.meet("a glance at exchanges", msgpack.packb([*self._last]))
        slowdown = self._sensor.glance_at_steps([msgpack.unpackb(body) for body in told])
        if slowdown is not None:
            self._sensor.note_examination(slowdown, found=self._examine_links(slowdown, sure=False))
        self._plan_glance()

    def _plan_glance(self) -> None:
        """Plan the next glance, in a run whose workers meet in each step anyway."""
        sync = self._loop.backward.sync
        meets = (
            sync.exchanges_in_backward
            and not sync.replicas_diverge
            and self._loop.abilities.remote is None
        )
        ahead = self._sensor.steps_ahead if meets and not self._survives else None
        self._next = None if ahead is None else self._loop.steps_made + ahead

    def _examine_links(self, slowdown: Slowdown, *, sure: bool = True) -> bool:
        """Find out whose link it is, say so, and return whether it is one.

        Where exchanges may be long for a moment, only that is said.
        """
        longer = (
            f"exchanges take {slowdown.now * 1e3:.1f} ms of a step where it was "
            f"{slowdown.usual * 1e3:.1f} ms"
        )
        if self._survives:
            self._history.announce_event(
                f"{longer}: a link between hosts has become slow, or who uses it; "
                "where losses are survived none is measured"
            )
            return False
        agreement, hosts = self._axes.everyone, self._axes.cluster().host_names()
        try:
            rates = self._measure_rates()
        except PacelineError as error:
            if sure:
                self._history.announce_event(f"{longer}, and links can't be measured ({error})")
            return False
        (before, sent), (steps, total) = self._marks[0], self._marks[-1]
        mine = [
            (total - sent) / max(steps - before, 1),
            *_estimate_codec_cost(len(self._axes.cluster().hosts)),
        ]
        facts = [msgpack.unpackb(body) for body in agreement.meet("links", msgpack.packb(mine))]
        where = self._axes.cluster().host_by_rank()
        leaving = [
            sum(fact[0] for fact, host in zip(facts, where, strict=True) if host == each)
            for each in range(len(set(where)))
        ]
        codec = CodecCost(
            max(fact[1] for fact in facts), statistics.median(fact[2] for fact in facts)
        )
        link, most = find_slow_links(rates), max(leaving)
        if link is None or most / link.rate < EXPLAINS * slowdown.now:
            slowest = _format_mbit(min(rates.values()))
            if sure:
                self._history.announce_event(
                    f"{longer}, though every link between hosts carries {slowest} or more: "
                    "see what else runs on the hosts"
                )
            return False
        machines = [hosts[where.index(host)] for host in link.hosts]
        gain = predict_speedup(
            slowdown, most, link.rate, most * len(leaving) / (8 * (len(leaving) - 1)), codec
        )
        self._announce_link(longer, link, machines, gain)
        return True

    def _announce_link(
        self, longer: str, link: SlowLink, machines: Sequence[str], gain: float
    ) -> None:
        carried = (
            _format_mbit(link.rate)
            if link.usual is None
            else f"{_format_mbit(link.rate)}, where others carry {_format_mbit(link.usual)}"
        )
        one = len(machines) == 1
        whose = (
            f"the link of {machines[0]}" if one else f"the link between {' and '.join(machines)}"
        )
        if len(machines) > 2:
            whose = f"the links of {', '.join(machines)}"
        self._remark = f"{whose} slow: {_format_mbit(link.rate)}"
        pays = format_as_call(self._strategy) == "AllReduce()" and gain >= WORTH
        advice = (
            f"AllReduce(codec=int8()) would make steps about {gain:.2f} times as fast; "
            "or see what else uses it"
            if pays
            else ""
        )
        words = f"{longer}: {whose} carr{'y' if len(machines) > 2 else 'ies'} {carried}"
        self.slow_links.append(
            {
                "step": self._loop.steps_made,
                "hosts": list(machines),
                "rate": link.rate,
                "usual": link.usual,
                "gain": gain if pays else None,
            }
            | {"words": words, "advice": advice}
        )
        self._history.announce_event(f"{words}. {advice or 'See what else uses it'}")

    def _measure_rates(self) -> dict[tuple[int, int], float]:
        """Measure how many bytes a second go from each host to each other. Collective."""
        cluster, group = self._axes.cluster(), self._axes.everyone.group
        first = [host.ranks[0] for host in cluster.hosts]
        connected = connect_pairs(group, hostnames=cluster.host_names())
        try:
            meter = LinkMeter(connected)
            mine = meter.measure_alone(
                [[(first[a], first[b]) for a, b in each] for each in plan_rounds(len(first))],
                STREAM,
            )
            meter.meet_workers()
        except BaseException:
            connected.abort()
            raise
        connected.close()
        where = cluster.host_by_rank()
        told = self._axes.everyone.meet(
            "rates of links", msgpack.packb([[*each.pair, each.rate] for each in mine])
        )
        return {(where[a], where[b]): rate for body in told for a, b, rate in msgpack.unpackb(body)}


def _estimate_codec_cost(hosts: int) -> tuple[float, float]:
    """Bytes of int8 as a part of exact sums, and its seconds for an element summed by these
    hosts.
    """
    coding, x = int8(), torch.linspace(-1.0, 1.0, TRIED)
    _, message = make_message(coding, TRIED)
    tries = []
    for _ in range(3):
        began = time.perf_counter()
        coding.encode(x, message)
        encoded = time.perf_counter()
        coding.decode(message, x)
        tries.append((encoded - began, time.perf_counter() - encoded))
    encoding, decoding = (min(column) / TRIED for column in zip(*tries, strict=True))
    again = 0.0 if hosts == 2 else 1 / hosts  # sums of pieces are encoded again
    return count_message_bytes(coding, TRIED) / (4 * TRIED), encoding * (1 + again) + 2 * decoding


def _format_mbit(rate: float) -> str:
    return f"{rate * 8e-6:,.3g} Mbit/s" if rate < 12.5e6 else f"{rate * 8e-6:,.0f} Mbit/s"
