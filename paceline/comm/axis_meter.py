"""Measures what a worker exchanges along one axis of a mesh, and shows the exchange that it stands
still for.

tensor   | compute | sum | compute | sum |          it stands still in each exchange
shard    | compute . . . . . . | wait | compute     an exchange is on its way while it computes; for
                                                    the rest of it, it stands still
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from paceline.comm.group import Group, Traffic, Work
from paceline.comm.pairs import Pairs
from paceline.trace import Trace

T = TypeVar("T")


class AxisMeter:
    """The exchanges of one worker along `axis`, in groups that nothing else uses while it
    trains.
    """

    def __init__(self, axis: str, trace: Trace | None = None) -> None:
        self.axis = axis
        self.seconds = 0.0  # for which this worker has stood still, waits for others included
        self.since: float | None = None  # when the wait under way has begun (`time.monotonic`)
        self.calls = 0  # steps in which something was exchanged
        # when the last exchange of each of the last ones was over
        self.ended: deque[float] = deque(maxlen=64)
        self._trace = (Trace(0) if trace is None else trace).along(axis)
        self._name, self._step, self._counted = "", 0, -1
        self._groups: list[Group | Pairs] = []

    def add(self, group: Group | Pairs) -> None:
        """Count what is sent in another group, or in messages, too."""
        if all(group is not known for known in self._groups):
            self._groups.append(group)

    @property
    def what(self) -> str:
        """The last exchange, in words."""
        return f"{self._name} along `{self.axis}` of step {self._step}" if self._name else ""

    @property
    def traffic(self) -> Traffic:
        """The bytes that this worker has sent along the axis."""
        return sum((group.traffic for group in self._groups), Traffic())

    @contextmanager
    def exchange(self, name: str) -> Iterator[None]:
        """Measure an exchange for which this worker stands still, inside of the block."""
        started = self._stand(name)
        try:
            yield
        finally:
            self._trace.record(name, self.axis, started, self._go_on(started))

    @contextmanager
    def standing(self, name: str) -> Iterator[None]:
        """Measure a wait for an exchange that may go on after it, inside of the block."""
        started = self._stand(name)
        try:
            yield
        finally:
            self._trace.record(name, "exchange", started, self._stop(started))

    def wait(self, work: Work[T], name: str, begun: int) -> T:
        """Wait for the end of an exchange that has `begun` before (`time.perf_counter_ns`), and
        measure the wait.
        """
        if work.done():
            found, self._name = work.wait(), name
            self._note()
            self._trace.record(name, self.axis, begun, time.perf_counter_ns())
            return found
        started = self._stand(name)
        try:
            return work.wait()
        finally:
            ended = self._go_on(started)
            self._trace.record(name, "exchange", started, ended)
            self._trace.record(name, self.axis, begun, ended)

    def _stand(self, name: str) -> int:
        self._name, self._step, self.since = name, self._trace.step, time.monotonic()
        return time.perf_counter_ns()

    def _go_on(self, started: int) -> int:
        self._note()
        return self._stop(started)

    def _stop(self, started: int) -> int:
        self.since = None
        ended = time.perf_counter_ns()
        self.seconds += (ended - started) / 1e9
        return ended

    def _note(self) -> None:
        """Note that an exchange is over; those of one step count as one call."""
        self._step, now = self._trace.step, time.monotonic()
        if self._step == self._counted:
            self.ended[-1] = now
            return
        self._counted = self._step
        self.calls += 1
        self.ended.append(now)
