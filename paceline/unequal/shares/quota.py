"""Measures how long a quota needs to provide the processor time that a step has used.

A worker with half a core regains its quota while it waits for other workers. It looks as fast as
one with a whole core, until it has more to do. So a step counts for at least as long as the quota
needs to provide the processor time of the step:

processor    ####....####....####....    60 ms used with half a core: at least 120 ms, even if
             ############------------    it ran for 60 ms without a gap, then waited for others
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from paceline.cluster import machine

# seconds between two readings of the quota, at least: it may change during a run
LOOK: Final = 0.25


class ProcessorQuota:
    """Measures how long the quota of a host needs to provide what each step uses.

    Args:
        workers: Number of workers on the host, which share its quota.
        quota: Reads the quota in cores; None without a limit.
        used: Reads the processor seconds of this process so far.
        clock: Reads the time in seconds.
    """

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
        """Leave out the processor time since the last call: no step has used it."""
        self._before = self._used()

    def measure_lap(self) -> float:
        """Seconds the quota needs for the time used since the last call; 0 without a limit."""
        now, used = self._clock(), self._used()
        spent, self._before = used - self._before, used
        if now - self._looked >= LOOK:
            self._looked, self._cores = now, self._quota()
        # The quota holds for the host as a whole; its workers are taken to use equal parts.
        return 0.0 if not self._cores else spent * self._workers / self._cores
