"""Tracing: counters always, spans in a bounded ring, on one clock. Imports nothing of ours."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Span(NamedTuple):
    """A stretch of time of one worker: nanoseconds of this process's monotonic clock."""

    name: str
    kind: str  # "compute" | "exchange" | "wait" | "data" | "step" | ...
    start: int
    end: int
    step: int


class Served(NamedTuple):
    """The work of a server, on a clock so many nanoseconds ahead of rank 0's; and how many messages had to wait, from when on."""

    name: str
    ahead: int
    spans: list[Span]
    waiting: list[tuple[int, int]]


class Trace:
    """Counters and the spans of the last steps of one worker.

    `capacity` bounds the number of spans kept (None: all of them, 0: none).
    """

    def __init__(self, capacity: int | None = 20_000) -> None:
        self.counters: Counter[str] = Counter()
        self.step = 0
        self._spans: deque[Span] = deque(maxlen=capacity)
        self.kept = capacity != 0

    def record(self, name: str, kind: str, start: int, end: int) -> None:
        """Keep one finished span; `start` and `end` are `time.perf_counter_ns()`."""
        self._spans.append(Span(name, kind, start, end, self.step))

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
        return list(self._spans)
