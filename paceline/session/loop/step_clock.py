"""Where the time of a step goes on this worker, and what was sent in it.

asked ── data ── begin ── compute, exchange, wait ── stop ── settle (exchange, wait) ── taken
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

from paceline.comm.group import Traffic
from paceline.sync.autograd import GradientTracker
from paceline.sync.context import SyncContext


class StepClock:
    """Of the step under way; `sent` is of all steps: what was broadcast at the start or by `resume` is left out."""

    def __init__(self, context: SyncContext, backward: GradientTracker) -> None:
        self._context, self._backward = context, backward
        self.sent = Traffic()
        self._step: defaultdict[str, float] = defaultdict(float)
        self._asked = self._began = time.perf_counter()
        self._exposed = self._waited = 0.0
        self._sent = self._aside = Traffic()

    def ask(self) -> None:
        """The next batch is asked for."""
        self._asked = time.perf_counter()

    def begin(self, now: float) -> None:
        """A turn begins with it."""
        context = self._context
        self._step["data"] += now - self._asked
        context.trace.record("data", "data", int(self._asked * 1e9), int(now * 1e9))
        self._began = now
        self._backward.since = int(now * 1e9)
        self._exposed, self._waited = self._backward.seconds + context.pulling, context.waited
        self._sent, self._aside = context.traffic, context.probe_traffic

    def hold(self, seconds: float) -> None:
        """This worker was held since: it neither computed nor waited for others."""
        self._began += seconds

    def stop(self) -> None:
        """The turn ends."""
        context, now = self._context, time.perf_counter()
        whole = now - self._began
        waited = min(context.waited - self._waited, whole)
        exchange = min(max(self._backward.seconds + context.pulling - self._exposed - waited, 0.0), whole - waited)
        self.sent += context.traffic - self._sent - (context.probe_traffic - self._aside)
        self._step["wait"] += waited
        self._step["exchange"] += exchange
        self._step["compute"] += whole - waited - exchange
        self._backward.computed(int(now * 1e9))
        context.trace.record("turn", "step", int(self._began * 1e9), int(now * 1e9))

    def settle(self, act: Callable[[], None]) -> None:
        """What is done between two turns belongs to the step."""
        context = self._context
        began, before, aside, waited = time.perf_counter(), context.traffic, context.probe_traffic, context.waited
        act()
        waited = context.waited - waited
        self._step["wait"] += waited
        self._step["exchange"] += max(time.perf_counter() - began - waited, 0.0)
        self.sent += context.traffic - before - (context.probe_traffic - aside)

    def take(self) -> dict[str, float]:
        """The seconds of the step, which is over."""
        seconds, self._step = dict(self._step), defaultdict(float)
        return seconds
