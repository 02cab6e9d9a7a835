"""Time and traffic of a step on this worker, by part, and of its exchanges, by axis of the mesh.

requested ── data ── begin ── compute, exchange, wait ── stop ── settle (exchange, wait)
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any, NamedTuple

from paceline.comm.group_protocol import Traffic
from paceline.loop.interruptions import InterruptionMeter
from paceline.sync.autograd import GradientTracker
from paceline.sync.context import SyncContext
from paceline.trace import DESTINATIONS, MEASURED_CAUSES, STEP_PARTS


class AxisTotals(NamedTuple):
    """Totals of steps' exchanges along one axis: seconds of standing still, and bytes sent."""

    seconds: float = 0.0
    within: int = 0
    between: int = 0

    def __add__(self, other: Any) -> AxisTotals:
        return AxisTotals(
            self.seconds + other.seconds, self.within + other.within, self.between + other.between
        )

    def __sub__(self, other: AxisTotals) -> AxisTotals:
        return AxisTotals(
            self.seconds - other.seconds, self.within - other.within, self.between - other.between
        )


class StepClock:
    """Measures the step under way.

    `sent` adds up all steps, without what was broadcast at the start or by `resume`.
    """

    def __init__(self, context: SyncContext, backward: GradientTracker) -> None:
        self._context, self._backward = context, backward
        self._within = self._between = 0  # bytes sent
        self._data = self._wait = self._exchange = self._compute = 0.0
        # when the next batch was asked for, and when the turn began
        self._asked = self._began = time.perf_counter()
        self.interruptions = InterruptionMeter(context.trace)
        self._reading = 0.0  # seconds for data in which nothing interrupted
        # seconds for which this worker was interrupted
        self._collection = self._stolen = self._paging = 0.0
        self._exposed = self._waited = 0.0
        self._sent = (0, 0)
        self._settled = (0, 0)  # what was sent up to the last step
        self._axes: defaultdict[str, AxisTotals] = defaultdict(AxisTotals)  # in all steps
        self._axes_before: dict[str, AxisTotals] = {}
        self._units, self._turns = 0.0, 0
        # Seconds of PARTS in all steps that have ended.
        self.step_seconds = dict.fromkeys(STEP_PARTS, 0.0)
        self.work = (0.0, 0)  # units of this worker in the last step, and turns of it

    @property
    def sent(self) -> Traffic:
        """Bytes sent in all steps."""
        return Traffic(self._within, self._between)

    @property
    def axes(self) -> dict[str, AxisTotals]:
        """Totals of exchanges by axis of the mesh; empty if no model is cut."""
        return dict(self._axes)

    def begin_waiting(self) -> None:
        """Begin to wait for the next batch."""
        self._asked = time.perf_counter()

    def begin_turn(self, now: float, units: float) -> None:
        """Begin a turn of a number of units, with the batch that was requested before."""
        self._units, self._turns = self._units + units, self._turns + 1
        context, backward = self._context, self._backward
        data = now - self._asked
        collection, stolen, paging = self.interruptions.take_interruptions(data)
        self._data += data
        self._reading += data - collection - stolen - paging
        self._collection, self._stolen, self._paging = (
            self._collection + collection,
            self._stolen + stolen,
            self._paging + paging,
        )
        began = int(now * 1e9)
        context.trace.record_span("data", "data", int(self._asked * 1e9), began)
        self._began = now
        backward.meter.start(began)
        self._sent, self._waited = context.sent_and_waited()
        self._exposed = backward.meter.seconds
        if context.meters:
            self._exposed += self._cut_seconds()
            self._axes_before = self._total_by_axis()

    def leave_out(self, seconds: float) -> None:
        """Leave out `seconds` for which this worker was paused: it neither computed nor waited."""
        self._began += seconds

    def end_turn(self) -> None:
        """End the turn."""
        context, backward, now = self._context, self._backward, time.perf_counter()
        sent, waited = context.sent_and_waited()
        passed, whole = waited - self._waited, now - self._began
        self._within, self._between = (
            self._within + sent[0] - self._sent[0],
            self._between + sent[1] - self._sent[1],
        )
        self._sent, self._waited = sent, waited
        passed = min(passed, whole)
        exposed = backward.meter.seconds + (self._cut_seconds() if context.meters else 0.0)
        exchange = min(max(exposed - self._exposed - passed, 0.0), whole - passed)
        self._wait += passed
        self._exchange += exchange
        compute = whole - passed - exchange
        self._compute += compute
        collection, stolen, paging = self.interruptions.take_interruptions(compute)
        self._collection, self._stolen, self._paging = (
            self._collection + collection,
            self._stolen + stolen,
            self._paging + paging,
        )
        ended = int(now * 1e9)
        if backward.meter.since:
            backward.meter.stop(ended)
        context.trace.record_span("turn", "step", int(self._began * 1e9), ended)
        if context.meters:
            self._add_axis_totals()

    def finish_step(self, began: float) -> dict[str, float]:
        """Count what was done since `began`, between two turns, as part of the step.

        Returns the seconds of the step by part, and by MEASURED, what this worker may be late for;
        and as SENT the bytes that went out.
        """
        sent, waited = self._context.sent_and_waited()
        passed = waited - self._waited
        self._within, self._between = (
            self._within + sent[0] - self._sent[0],
            self._between + sent[1] - self._sent[1],
        )
        self._sent, self._waited = sent, waited
        spent = time.perf_counter() - began
        exchange = self._exchange + max(spent - passed, 0.0)
        seconds = {
            "data": self._data,
            "wait": self._wait + passed,
            "exchange": exchange,
            "compute": self._compute,
        }
        for part, value in seconds.items():
            self.step_seconds[part] += value
        seconds |= zip(
            MEASURED_CAUSES,
            (self._reading, self._collection, self._stolen, self._paging),
            strict=True,
        )
        within, between = self._settled
        seconds |= zip(DESTINATIONS, (self._within - within, self._between - between), strict=True)
        self._settled = (self._within, self._between)
        self._data = self._wait = self._exchange = self._compute = self._reading = 0.0
        self._collection = self._stolen = self._paging = 0.0
        self.work, self._units, self._turns = (self._units, self._turns), 0.0, 0
        if self._context.meters:
            self._add_axis_totals(spent)
        return seconds

    def read_open_step(self) -> dict[str, float]:
        """Read the seconds of PARTS of the step under way, as far as its turns have ended."""
        return {
            "compute": self._compute,
            "exchange": self._exchange,
            "wait": self._wait,
            "data": self._data,
        }

    def _cut_seconds(self) -> float:
        """Seconds of exchanges of cuts since the run began during which nothing was computed."""
        return sum(meter.seconds for meter in self._context.meters)

    def _total_by_axis(self) -> dict[str, AxisTotals]:
        """Exchanges along each axis since the run began.

        Bytes that no cut has sent belong to the strategy, along `data`.
        """
        context = self._context
        by_axis = {
            meter.axis: AxisTotals(meter.seconds, *meter.traffic.as_pair)
            for meter in context.meters
        }
        within, between = self._sent
        cuts = sum(by_axis.values(), AxisTotals())
        exposed = self._backward.meter.seconds
        data = AxisTotals(exposed, within - cuts.within, between - cuts.between)
        return {**by_axis, "data": data}

    def _add_axis_totals(self, more: float = 0.0) -> None:
        """Count what was exchanged since the last time, and `more` seconds of the strategy's."""
        now = self._total_by_axis()
        for axis, total in now.items():
            self._axes[axis] += total - self._axes_before.get(axis, AxisTotals())
        self._axes["data"] += AxisTotals(more)
        self._axes_before = now
