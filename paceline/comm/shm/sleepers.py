"""Sleep until a counter of another rank in shared memory is raised; whoever raises its own wakes those who sleep.

    rank 0                                       rank 1
    asleep of rank 0: 1
    futex: sleep while the counter is 4          counter: 5, then looks whether somebody is asleep: wake all at this counter
    asleep of rank 0: 0

A rank that raises its counter in the very moment in which another falls asleep may not see that: then the sleep ends by its time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from paceline.comm.shm import futex

FUTEX = futex.available()


class Sleepers:
    """The sleep of one rank. `cells` are int64, from address `start` on: `mine` counts its threads asleep, `others` those of others."""

    def __init__(self, cells: memoryview, start: int, mine: int, others: Sequence[int]) -> None:
        self._cells, self._start, self._mine, self._others = cells, start, mine, others
        self._counting = threading.Lock()

    def rest(self, counters: Sequence[int], value: int, seconds: float) -> bool:
        """Sleep until one of these counters that is below `value` is raised, at most so long; False at once if none is below it."""
        cells = self._cells
        behind = next((at for at in counters if cells[at] < value), None)
        if behind is None or not FUTEX:
            return False
        self._count(1)
        try:
            seen = cells[behind]
            if seen < value:
                futex.wait(self._start + 8 * behind, seen, seconds)
        finally:
            self._count(-1)
        return True

    def wake(self, counter: int) -> None:
        """Wake those who sleep until this counter, which was raised, is."""
        cells = self._cells
        for at in self._others:
            if cells[at]:
                futex.wake(self._start + 8 * counter)
                return

    def _count(self, more: int) -> None:
        with self._counting:
            self._cells[self._mine] += more
