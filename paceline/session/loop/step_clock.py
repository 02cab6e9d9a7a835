"""Time and traffic of a step on this worker, by part: data, compute, exchange, wait.

asked ── data ── begin ── compute, exchange, wait ── stop ── settle (exchange, wait)
"""

from __future__ import annotations

import time

from paceline.comm.group import Traffic
from paceline.sync.autograd import GradientTracker
from paceline.sync.context import SyncContext


class StepClock:
    """Measures the step under way. `sent` adds up all steps, without what was broadcast at the start or by `resume`."""

    def __init__(self, context: SyncContext, backward: GradientTracker) -> None:
        self._context, self._backward = context, backward
        self._within = self._between = 0  # bytes sent
        self._data = self._wait = self._exchange = self._compute = 0.0
        self.asked = self._began = time.perf_counter()  # when the next batch was asked for, and when the turn began
        self._exposed = self._waited = 0.0
        self._sent = (0, 0)

    @property
    def sent(self) -> Traffic:
        """Bytes sent in all steps."""
        return Traffic(self._within, self._between)

    def begin(self, now: float) -> None:
        """Begin a turn with the batch that was asked for."""
        context, backward = self._context, self._backward
        self._data += now - self.asked
        began = int(now * 1e9)
        context.trace.record("data", "data", int(self.asked * 1e9), began)
        self._began, backward.since = now, began
        self._sent, self._waited = context.sent_and_waited()
        self._exposed = backward.seconds + context.pulling

    def hold(self, seconds: float) -> None:
        """Leave out `seconds` for which this worker was held: it neither computed nor waited for others."""
        self._began += seconds

    def stop(self) -> None:
        """End the turn."""
        context, backward, now = self._context, self._backward, time.perf_counter()
        sent, waited = context.sent_and_waited()
        passed, whole = waited - self._waited, now - self._began
        self._within, self._between = self._within + sent[0] - self._sent[0], self._between + sent[1] - self._sent[1]
        self._sent, self._waited = sent, waited
        passed = min(passed, whole)
        exchange = min(max(backward.seconds + context.pulling - self._exposed - passed, 0.0), whole - passed)
        self._wait += passed
        self._exchange += exchange
        self._compute += whole - passed - exchange
        ended = int(now * 1e9)
        if backward.since:
            backward.computed(ended)
        context.trace.record("turn", "step", int(self._began * 1e9), ended)

    def settle(self, began: float) -> dict[str, float]:
        """Count what was done since `began`, between two turns, as part of the step. Returns the seconds of the step by part."""
        sent, waited = self._context.sent_and_waited()
        passed = waited - self._waited
        self._within, self._between = self._within + sent[0] - self._sent[0], self._between + sent[1] - self._sent[1]
        self._sent, self._waited = sent, waited
        exchange = self._exchange + max(time.perf_counter() - began - passed, 0.0)
        seconds = {"data": self._data, "wait": self._wait + passed, "exchange": exchange, "compute": self._compute}
        self._data = self._wait = self._exchange = self._compute = 0.0
        return seconds
