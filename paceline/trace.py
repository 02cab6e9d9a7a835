"""Tracing of one worker: counters, and spans of time in a bounded ring, on one clock.

Imports nothing from paceline.
"""

from __future__ import annotations

import copy
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

# Parts of a step, in this order everywhere.
STEP_PARTS: Final = ("compute", "exchange", "wait", "data")
# Destinations of bytes: inside a host, and between hosts.
DESTINATIONS: Final = ("within", "between")
# Causes of lateness that each worker measures in a step, as seconds that don't overlap.
MEASURED_CAUSES: Final = ("reading", "collection", "stolen", "paging")


class Span(NamedTuple):
    """A stretch of time of one worker, in nanoseconds of its process's monotonic clock."""

    name: str
    kind: str  # "compute" | "exchange" | "wait" | "data" | "step" | ...
    start: int
    end: int
    step: int
    # Axis of the mesh along which workers exchange in it. "" for other spans, and without a mesh.
    axis: str = ""


class ServerWork(NamedTuple):
    """The work of a server, for the timeline.

    `ahead` is the number of nanoseconds that its clock is ahead of rank 0's. `waiting` holds pairs
    of a time and the number of messages that wait from then on.
    """

    name: str
    ahead: int
    spans: list[Span]
    waiting: list[tuple[int, int]]


class _SpanRing:
    """The recorded spans, and the current step. Traces of all axes share it."""

    def __init__(self, capacity: int | None) -> None:
        self.spans: deque[Span] = deque(maxlen=capacity)
        self.step = 0


class Trace:
    """Counters of one worker, and the spans of its last steps.

    `capacity` is the largest number of spans that are kept (None: all of them, 0: none).
    """

    def __init__(self, capacity: int | None = 20_000) -> None:
        self.counters: Counter[str] = Counter()
        self.axis = ""
        self.keeps_spans = capacity != 0
        self._ring = _SpanRing(capacity)

    @property
    def step(self) -> int:
        """Step to which new spans belong."""
        return self._ring.step

    @step.setter
    def step(self, step: int) -> None:
        self._ring.step = step

    def copy_for_axis(self, axis: str) -> Trace:
        """Copy this trace for exchanges along one axis of the mesh.

        Both share counters and spans. Spans that the copy records name the axis.
        """
        axis_trace = copy.copy(self)
        axis_trace.axis = axis
        return axis_trace

    def record_span(self, name: str, kind: str, start: int, end: int) -> None:
        """Record a finished span. `start` and `end` are times of `time.perf_counter_ns()`."""
        self._ring.spans.append(Span(name, kind, start, end, self._ring.step, self.axis))

    @contextmanager
    def measure_span(self, name: str, kind: str) -> Iterator[None]:
        """Record the time spent inside the `with` block as a span."""
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self.record_span(name, kind, start, time.perf_counter_ns())

    def list_spans(self) -> list[Span]:
        """List the recorded spans, oldest first."""
        return list(self._ring.spans)


class ComputeMeter:
    """Measures when a worker computes, and how long it stands still for exchanges (nanoseconds).

        turn begins   end of backward            end of the exchange      turn ends
        |--- compute -|--- exchange (exposed) ---|--- compute ------------|
        since         0                          since                    0

    Attributes:
        seconds: Sum of the exchanges during which nothing was computed.
        since: Time at which this worker began to compute; 0 if it doesn't, as outside of a turn.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.seconds = 0.0
        self.since = 0

    def start(self, since: int) -> None:
        """Count time from `since` on as computing; 0: count nothing."""
        self.since = since

    def stop(self, until: int) -> None:
        """Record that this worker computed until `until`, if it did."""
        if self.since:
            self._trace.record_span("compute", "compute", self.since, until)
            self.since = 0

    def end_exchange(self, where: str, started: int) -> None:
        """Record an exchange that began at `started` and ends now; computing goes on."""
        ended = self.since = time.perf_counter_ns()
        self.seconds += (ended - started) / 1e9
        self._trace.record_span(where, "exchange", started, ended)

    def expose(self, seconds: float) -> None:
        """Count time of an exchange that was measured elsewhere."""
        self.seconds += seconds
