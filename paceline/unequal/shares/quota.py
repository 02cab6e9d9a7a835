"""Processor time that a step takes of a quota.

A worker with half a core that waits for others finds its quota whole again when it goes on. It
looks as fast as one with a whole core, until it has more to do. So a step is taken to last for as
long as the quota needs to give the time that the step has used:

processor    ####....####....####....    used 60 ms, half a core: 120 ms at least, even if
             ############------------    it ran for 60 ms, and waited for the others then
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from paceline.cluster import machine

LOOK: Final = 0.25  # seconds after which the quota is looked up anew, at least: it may change


class ProcessorQuota:
    """Measures how much of its quota each step takes; `workers` of the host share that quota."""

    def __init__(
        self,
        workers: int,
        *,
        quota: Callable[[], float | None] = machine.read_cpu_quota,
        used: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers, self._quota, self._used, self._clock = workers, quota, used, clock
        self._before = used()
        self._looked = -LOOK
        self._cores: float | None = None

    def skip_use(self) -> None:
        """Leave out use since the last call that no step has caused."""
        self._before = self._used()

    def measure_lap(self) -> float:
        """Seconds in which the quota gives what was used since the last call; 0 without a limit."""
        now, used = self._clock(), self._used()
        spent, self._before = used - self._before, used
        if now - self._looked >= LOOK:
            self._looked, self._cores = now, self._quota()
        return 0.0 if not self._cores else spent * self._workers / self._cores
