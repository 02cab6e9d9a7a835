"""Measures interruptions of a step: garbage collection, stolen processor time, swapping.

Each comes from counters of the thread that trains, which the kernel and Python keep anyway:

    garbage collection   Python calls back before and after each one: its processor seconds
    stolen processor     /proc/self/task/N/schedstat: the thread could run and didn't, because
                         another one ran or a quota was used up;
                         in a virtual machine also /proc/stat, once a second: its host says there
                         how much it took
    swapping             major page faults; while there are any, the time in which the thread
                         neither ran nor could run
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import threading
import time
from io import FileIO
from pathlib import Path
from typing import Final, NamedTuple

from paceline.trace import Trace

PROC: Final = Path("/proc")
LONG_NS: Final = 1_000_000  # a garbage collection that is worth a span
LONGEST_FAULT: Final = 0.01  # seconds: the most that one page is taken to have been waited for
# Seconds of standing still below which the kernel isn't asked: to ask takes a tenth of that.
_SHORT = 2e-4
_EVERY = 1.0  # seconds between two looks at what the host of a virtual machine takes
_WHO = getattr(resource, "RUSAGE_THREAD", None)


class Interruptions(NamedTuple):
    """Seconds in which a worker was interrupted, by cause; they don't overlap."""

    collection: float = 0.0
    stolen: float = 0.0
    paging: float = 0.0


class _Counters(NamedTuple):
    """The counters of a thread."""

    delayed: float = 0.0  # seconds
    faults: int = 0


class InterruptionMeter:
    """Measures interruptions of the thread that calls `take_interruptions`, from its first call on.

    `trace` gets long garbage collections.
    """

    def __init__(self, trace: Trace, proc: Path = PROC) -> None:
        self._trace, self._proc = trace, proc
        self._thread = 0
        self._process = os.getpid()
        self._schedstat: FileIO | None = None
        self._closed = False
        self._last_counters = _Counters()
        # seconds of the clock, and of this thread on a processor, at the last call
        self._clock = self._seconds_run = 0.0
        self._collected = 0.0  # seconds of garbage collections since the last call
        # beginning of the collection under way, by the two clocks
        self._collecting: tuple[float, int] | None = None
        self._looked_at, self._ticks = 0.0, 0

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """Causes that can't be measured here; their time counts as compute or data loading."""
        told = Path(self._proc, "self/schedstat").exists()
        return (*(() if told else ("stolen",)), *(() if _WHO is not None else ("paging",)))

    def take_interruptions(self, seconds: float) -> Interruptions:
        """Seconds of interruptions of this thread since the last call, by cause.

        They are limited to `seconds` of its own work since then.
        """
        if self._closed:
            return Interruptions()
        if threading.get_ident() != self._thread:
            self._follow_thread()
            return Interruptions()
        # The thread stood still for whatever the clock has advanced more than its processor time.
        clock, ran = time.perf_counter(), time.thread_time()
        stood, self._clock, self._seconds_run = (
            (clock - self._clock) - (ran - self._seconds_run),
            clock,
            ran,
        )
        collection, self._collected = min(self._collected, seconds), 0.0
        outside = 0.0 if clock - self._looked_at < _EVERY else self._measure_stolen(clock)
        if stood < _SHORT:
            return Interruptions(collection, min(outside, seconds - collection))
        # Only a thread that stood still long enough is worth a question to the kernel.
        now, then = self._read_counters(), self._last_counters
        self._last_counters = now
        delayed = min(now.delayed - then.delayed, stood)
        stolen = min(delayed + outside, seconds - collection)
        paging = 0.0
        if now.faults > then.faults:
            idle = min(stood, seconds) - delayed
            paging = max(
                0.0,
                min(
                    idle, (now.faults - then.faults) * LONGEST_FAULT, seconds - collection - stolen
                ),
            )
        return Interruptions(collection, stolen, paging)

    def close(self) -> None:
        """Measure nothing more."""
        self._closed = True
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._note_collection)
        if self._schedstat is not None:
            self._schedstat.close()
            self._schedstat = None

    def _follow_thread(self) -> None:
        """Measure the calling thread from now on."""
        if self._note_collection not in gc.callbacks:
            gc.callbacks.append(self._note_collection)
        if self._schedstat is not None:
            self._schedstat.close()
            self._schedstat = None
        self._thread = threading.get_ident()
        with contextlib.suppress(OSError):  # `unmeasured` says so
            self._schedstat = FileIO(
                str(self._proc / f"self/task/{threading.get_native_id()}/schedstat")
            )
        self._collected, self._last_counters = 0.0, self._read_counters()
        self._clock, self._seconds_run = time.perf_counter(), time.thread_time()
        self._looked_at = self._clock
        self._ticks = self._read_stolen_ticks()

    def _read_counters(self) -> _Counters:
        delayed = 0.0
        if self._schedstat is not None:
            delayed = int(os.pread(self._schedstat.fileno(), 64, 0).split()[1]) * 1e-9
        faults = 0 if _WHO is None else resource.getrusage(_WHO).ru_majflt
        return _Counters(delayed, faults)

    def _measure_stolen(self, now: float) -> float:
        """Seconds that this virtual machine's host took from one processor since the last look."""
        self._looked_at, before, self._ticks = now, self._ticks, self._read_stolen_ticks()
        return (self._ticks - before) / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)

    def _read_stolen_ticks(self) -> int:
        """Ticks that the host of this virtual machine has ever taken from all its processors."""
        try:
            with (self._proc / "stat").open("rb") as file:
                return int(file.readline().split()[8])
        except (OSError, IndexError, ValueError):
            return 0

    def _note_collection(self, phase: str, info: dict[str, int]) -> None:
        """Note that Python begins, or ends, to search for garbage."""
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._collecting = time.thread_time(), time.perf_counter_ns()
        elif self._collecting is not None:
            (ran, began), self._collecting = self._collecting, None
            self._collected += time.thread_time() - ran
            now = time.perf_counter_ns()
            # and not a reader's, which was forked
            if now - began >= LONG_NS and os.getpid() == self._process:
                self._trace.record_span(
                    f"generation {info['generation']}", "collection", began, now
                )
