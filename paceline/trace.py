"""Tracing: counters always, spans in a bounded ring, on one clock. Imports nothing of ours."""

from __future__ import annotations

import copy
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

PARTS: Final = ("compute", "exchange", "wait", "data")  # of a step, in this order everywhere
SENT: Final = ("within", "between")  # where bytes went: inside a host, and from one to another
# what each worker measures of a step, seconds that don't overlap
MEASURED: Final = ("reading", "collection", "stolen", "paging")


class Span(NamedTuple):
    """A stretch of time of one worker: nanoseconds of this process's monotonic clock."""

    name: str
    kind: str  # "compute" | "exchange" | "wait" | "data" | "step" | ...
    start: int
    end: int
    step: int
    # of the mesh, along which workers exchange in it; "" for all else, and where nothing is cut
    axis: str = ""


class Served(NamedTuple):
    """The work of a server, on a clock so many nanoseconds ahead of rank 0's; and how many
    messages had to wait, from when on.
    """

    name: str
    ahead: int
    spans: list[Span]
    waiting: list[tuple[int, int]]


class _Ring:
    """The spans that are kept, and the step under way."""

    def __init__(self, capacity: int | None) -> None:
        self.spans: deque[Span] = deque(maxlen=capacity)
        self.step = 0


class Trace:
    """Counters and the spans of the last steps of one worker.

    `capacity` bounds the number of spans kept (None: all of them, 0: none).
    """

    def __init__(self, capacity: int | None = 20_000) -> None:
        self.counters: Counter[str] = Counter()
        self.axis = ""
        self.kept = capacity != 0
        self._ring = _Ring(capacity)

    @property
    def step(self) -> int:
        """The step that spans belong to."""
        return self._ring.step

    @step.setter
    def step(self, step: int) -> None:
        self._ring.step = step

    def along(self, axis: str) -> Trace:
        """Return this trace for exchanges along an axis of the mesh: what is recorded there is
        kept here, and names the axis.
        """
        found = copy.copy(self)
        found.axis = axis
        return found

    def record(self, name: str, kind: str, start: int, end: int) -> None:
        """Keep one finished span; `start` and `end` are `time.perf_counter_ns()`."""
        self._ring.spans.append(Span(name, kind, start, end, self._ring.step, self.axis))

    @contextmanager
    def span(self, name: str, kind: str) -> Iterator[None]:
        """Record the time spent inside the block."""
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self.record(name, kind, start, time.perf_counter_ns())

    def spans(self) -> list[Span]:
        """Return the spans kept, oldest first."""
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
            self._trace.record("compute", "compute", self.since, until)
            self.since = 0

    def end_exchange(self, where: str, started: int) -> None:
        """Record an exchange that began at `started` and ends now; computing goes on."""
        ended = self.since = time.perf_counter_ns()
        self.seconds += (ended - started) / 1e9
        self._trace.record(where, "exchange", started, ended)

    def expose(self, seconds: float) -> None:
        """Count time of an exchange that was measured elsewhere."""
        self.seconds += seconds
