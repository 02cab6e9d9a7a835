"""Measures the exchanges of a worker along one axis of a mesh, and the time that it waits for them.

tensor   | compute | sum | compute | sum |         the worker stands still during each exchange
shard    | compute . . . . . . | wait | compute    it computes during an exchange (dots), and
                                                   stands still for the rest of it
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from paceline.comm.group_protocol import Group, Traffic, Work
from paceline.comm.pairs import Pairs
from paceline.trace import Trace

T = TypeVar("T")


class AxisMeter:
    """The exchanges of one worker along `axis`, in groups that nothing else uses in training.

    `since` is set while the worker stands still. Exchanges of one step count as one call.
    """

    def __init__(self, axis: str, trace: Trace | None = None) -> None:
        self.axis = axis
        self.seconds = 0.0  # time that this worker has stood still, waits for others included
        self.since: float | None = None  # time.monotonic() at the begin of the wait under way
        self.calls = 0  # steps with an exchange
        # time.monotonic() at the end of the last exchange of each of the last steps.
        self.ended: deque[float] = deque(maxlen=64)
        self._trace = (Trace(0) if trace is None else trace).copy_for_axis(axis)
        self._name, self._step, self._counted_step = "", 0, -1
        self._groups: list[Group | Pairs] = []

    def add_sender(self, group: Group | Pairs) -> None:
        """Count the traffic of one more group, or of messages beside groups."""
        if all(group is not counted for counted in self._groups):
            self._groups.append(group)

    @property
    def what(self) -> str:
        """Name of the last exchange, in words."""
        return f"{self._name} along `{self.axis}` of step {self._step}" if self._name else ""

    @property
    def traffic(self) -> Traffic:
        """Number of bytes that this worker has sent along the axis."""
        return sum((group.traffic for group in self._groups), Traffic())

    @contextmanager
    def measure_exchange(self, name: str) -> Iterator[None]:
        """Measure an exchange during which this worker stands still: the block."""
        started = self._begin_wait(name)
        try:
            yield
        finally:
            self._trace.record_span(name, self.axis, started, self._end_exchange(started))

    @contextmanager
    def measure_wait(self, name: str) -> Iterator[None]:
        """Measure a wait for an exchange that may go on after it: the block."""
        started = self._begin_wait(name)
        try:
            yield
        finally:
            self._trace.record_span(name, "exchange", started, self._end_wait(started))

    def wait_measured(self, work: Work[T], name: str, begun: int) -> T:
        """Wait for an exchange, and measure the wait.

        Args:
            work: The exchange under way.
            name: Name of its span.
            begun: time.perf_counter_ns() at its begin.
        """
        # It has ended during other work, so nothing was waited for.
        if work.done():
            result, self._name = work.wait(), name
            self._note_exchange()
            self._trace.record_span(name, self.axis, begun, time.perf_counter_ns())
            return result
        # The wait is time that this worker stood still; the exchange itself began earlier.
        started = self._begin_wait(name)
        try:
            return work.wait()
        finally:
            ended = self._end_exchange(started)
            self._trace.record_span(name, "exchange", started, ended)
            self._trace.record_span(name, self.axis, begun, ended)

    def _begin_wait(self, name: str) -> int:
        self._name, self._step, self.since = name, self._trace.step, time.monotonic()
        return time.perf_counter_ns()

    def _end_exchange(self, started: int) -> int:
        self._note_exchange()
        return self._end_wait(started)

    def _end_wait(self, started: int) -> int:
        self.since = None
        ended = time.perf_counter_ns()
        self.seconds += (ended - started) / 1e9
        return ended

    def _note_exchange(self) -> None:
        """Note that an exchange has ended. Those of one step count as one call."""
        self._step, now = self._trace.step, time.monotonic()
        # Several exchanges of a step count once; only the end of the last one matters.
        if self._step == self._counted_step:
            self.ended[-1] = now
            return
        self._counted_step = self._step
        self.calls += 1
        self.ended.append(now)
