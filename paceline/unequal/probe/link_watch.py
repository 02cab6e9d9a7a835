"""Finds slow links: measures the links between hosts once exchanges take longer than before.

Links are measured between two steps, while training waits.

flush   flush   flush (slow for long enough)              flush
  |  :  :  |  :  :  | rounds of pairs of hosts,             | the line, the status line,
     |                a few 100 KB each                       `links` of the summary
     a glance: were the last two steps both very slow?
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

STREAM: Final = 0.08  # seconds of a stream in one direction, about
TRIED: Final = 1 << 20  # elements that are encoded to predict the cost of a codec
# part of the exchange that a link has to take to be the reason for a slow exchange
EXPLAINS: Final = 0.5
WORTH: Final = 1.1  # speed-up from which a codec is advised


class LinkWatch:
    """One worker's part in watching the links of a run on several hosts.

    All workers take the same decisions at the same steps, so measurements need no request.

    Args:
        loop: Training loop whose steps are watched.
        axes: Groups of workers of the run.
        strategy: Strategy of the run, for advice about codecs.
        history: History that lines about slow links go to.
        survives: Whether the run goes on when workers are lost; then links aren't measured.
    """

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
        # Seconds of STEP_PARTS of the last steps of this worker.
        self._last: deque[list[float]] = deque(maxlen=2)
        self._next: int | None = None  # the step after which all workers send notes for a glance
        self._notes: list[bytes] = []  # of all workers; empty until they have come
        # Steps, and bytes that this worker has sent between hosts, at the last two flushes.
        self._marks: deque[tuple[int, int]] = deque(maxlen=2)
        self._remark = ""
        self.slow_links: list[dict[str, Any]] = []

    @property
    def status_remark(self) -> str:
        """Words about a slow link for the status line; empty if exchanges aren't slow."""
        return self._remark if self._sensor.slow else ""

    def take_flush(self, names: Sequence[int], steps: Sequence[Sequence[Sequence[float]]]) -> None:
        """Take in the steps of all workers since the last flush, and measure links if slow.

        Collective: the input is the same on all workers.

        Args:
            names: Number of each worker in the run.
            steps: Seconds of STEP_PARTS, by rank and step.
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
        """Take in the seconds of a step of this worker, and glance at the last two if it is time.

        Collective. A worker knows only its own steps, so all send each other a note of their last
        two. Notes go with the meeting of the next step, and are read when that step has ended.
        """
        self._last.append([seconds.get(part, 0.0) for part in STEP_PARTS])
        if self._notes:
            self._glance_at_steps([msgpack.unpackb(note) for note in self._notes])
            self._notes.clear()
            self._plan_glance()
        elif self._next is not None and step >= self._next:
            self._axes.everyone.send_note(msgpack.packb([*self._last]), self._notes.extend)

    def _glance_at_steps(self, steps: Sequence[Sequence[Sequence[float]]]) -> None:
        """Judge the last two steps of all workers, and measure links if both were very slow."""
        if self._sensor.steps_ahead is None:  # a flush has found exchanges slow meanwhile
            return
        slowdown = self._sensor.glance_at_steps(steps)
        if slowdown is not None:
            found = self._examine_links(slowdown, sure=False)
            self._sensor.note_examination(slowdown, found=found)

    def _plan_glance(self) -> None:
        """Plan the next glance, if workers meet in each step anyway."""
        # In other runs notes would wait for a meeting that may be far away.
        sync = self._loop.backward.sync
        meets = (
            sync.exchanges_in_backward
            and not sync.replicas_diverge
            and self._loop.abilities.remote is None
        )
        ahead = self._sensor.steps_ahead if meets and not self._survives else None
        self._next = None if ahead is None else self._loop.steps_made + ahead

    def _examine_links(self, slowdown: Slowdown, *, sure: bool = True) -> bool:
        """Measure all links, and announce the slow one; True if there is one.

        Collective. If it isn't `sure` that exchanges stay slow, nothing but a slow link is
        announced.
        """
        longer = (
            f"exchanges take {slowdown.now * 1e3:.1f} ms of a step instead of "
            f"{slowdown.usual * 1e3:.1f} ms"
        )

        # A worker may be lost during a measurement, so such a run does without one.
        if self._survives:
            self._history.announce_event(
                f"{longer}: a link between hosts has become slow, or a worker that uses it; "
                "links aren't measured in a run that survives losses of workers"
            )
            return False
        agreement, hosts = self._axes.everyone, self._axes.cluster().host_names()
        try:
            rates = self._measure_rates()
        except PacelineError as error:
            if sure:
                self._history.announce_event(f"{longer}, and links can't be measured ({error})")
            return False

        # Bytes that each worker sends between hosts in a step, and its cost of a codec.
        (before, sent), (steps, total) = self._marks[0], self._marks[-1]
        own_facts = [
            (total - sent) / max(steps - before, 1),
            *_estimate_codec_cost(len(self._axes.cluster().hosts)),
        ]
        facts = [
            msgpack.unpackb(body) for body in agreement.meet("links", msgpack.packb(own_facts))
        ]
        host_by_rank = self._axes.cluster().host_by_rank()
        sent_by_host = [
            sum(fact[0] for fact, host in zip(facts, host_by_rank, strict=True) if host == each)
            for each in range(len(set(host_by_rank)))
        ]
        codec = CodecCost(
            max(fact[1] for fact in facts), statistics.median(fact[2] for fact in facts)
        )

        # A slow link is the reason only if its traffic explains a good part of the exchange.
        link, most = find_slow_links(rates), max(sent_by_host)
        if link is None or most / link.rate < EXPLAINS * slowdown.now:
            slowest = _format_mbit(min(rates.values()))
            if sure:
                self._history.announce_event(
                    f"{longer}, though every link between hosts carries {slowest} or more: "
                    "see what else runs on the hosts"
                )
            return False
        machines = [hosts[host_by_rank.index(host)] for host in link.hosts]

        # For n elements on h hosts, an exact sum sends 4 * n * 2 * (h - 1) / h bytes from each.
        count = len(sent_by_host)
        gain = predict_speedup(slowdown, most, link.rate, most * count / (8 * (count - 1)), codec)
        self._announce_link(longer, link, machines, gain)
        return True

    def _announce_link(
        self, longer: str, link: SlowLink, machines: Sequence[str], gain: float
    ) -> None:
        """Announce slow links of these hosts, with advice, and record them for the summary."""
        carried = (
            _format_mbit(link.rate)
            if link.usual is None
            else f"{_format_mbit(link.rate)}, and other links carry {_format_mbit(link.usual)}"
        )
        one = len(machines) == 1
        whose = (
            f"the link of {machines[0]}" if one else f"the link between {' and '.join(machines)}"
        )
        if len(machines) > 2:
            whose = f"the links of {', '.join(machines)}"
        self._remark = f"{whose} slow: {_format_mbit(link.rate)}"

        # The prediction holds for plain float32 sums, so only their strategy gets the advice.
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
        """Measure the rate from each host to each other host, in bytes per second. Collective."""
        cluster, group = self._axes.cluster(), self._axes.everyone.group
        first = [host.ranks[0] for host in cluster.hosts]
        connected = connect_pairs(group, hostnames=cluster.host_names())
        try:
            # The first worker of each host measures, and the others wait until it is done.
            meter = LinkMeter(connected)
            figures = meter.measure_alone(
                [[(first[a], first[b]) for a, b in each] for each in plan_rounds(len(first))],
                STREAM,
            )
            meter.meet_workers()
        except BaseException:
            connected.abort()
            raise
        connected.close()

        # Each source knows only its own rates: all hand over theirs.
        host_by_rank = cluster.host_by_rank()
        bodies = self._axes.everyone.meet(
            "rates of links", msgpack.packb([[*each.pair, each.rate] for each in figures])
        )
        return {
            (host_by_rank[source], host_by_rank[target]): rate
            for body in bodies
            for source, target, rate in msgpack.unpackb(body)
        }


def _estimate_codec_cost(hosts: int) -> tuple[float, float]:
    """Estimate the cost of int8: its bytes as a part of exact ones, and seconds per element.

    The seconds are those of a sum by this number of hosts.
    """
    coding, x = int8(), torch.linspace(-1.0, 1.0, TRIED)
    _, message = make_message(coding, TRIED)
    # The fastest of three: other programs may disturb some.
    tries = []
    for _ in range(3):
        began = time.perf_counter()
        coding.encode(x, message)
        encoded = time.perf_counter()
        coding.decode(message, x)
        tries.append((encoded - began, time.perf_counter() - encoded))
    encoding, decoding = (min(column) / TRIED for column in zip(*tries, strict=True))
    # With more than two hosts, the sum of each piece is encoded again.
    again = 0.0 if hosts == 2 else 1 / hosts
    return count_message_bytes(coding, TRIED) / (4 * TRIED), encoding * (1 + again) + 2 * decoding


def _format_mbit(rate: float) -> str:
    """Format a rate in bytes per second as Mbit/s."""
    return f"{rate * 8e-6:,.3g} Mbit/s" if rate < 12.5e6 else f"{rate * 8e-6:,.0f} Mbit/s"
