"""Wakes the ranks of a segment that sleep: each has a number of its own there, and whoever posts
changes it for those that sleep.

    rank 0 sleeps:  sleeps = 1, reads its bell, looks once more whether it has to    | sleeps until
                    the bell changes, or a short time
    rank 1 posts:   its counter, then looks who sleeps: rank 0's bell + 1, and wakes it

A wake-up may be lost where both look at the same moment, as stores and loads of a processor may
pass each other: so sleeps are short.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from paceline.comm.shm import futex


class Bell:
    """The bell of one rank.

    `cells`: the segment as int64; `places`: where each rank's two cells (sleeps, bell) begin;
    `start`: address.
    """

    def __init__(self, cells: memoryview, start: int, places: Sequence[int], rank: int) -> None:
        self._cells, self._mine, self._address = cells, places[rank], start + 8 * (places[rank] + 1)
        self._others = [
            (place, start + 8 * (place + 1)) for other, place in enumerate(places) if other != rank
        ]
        self._asleep = 0  # threads of this rank
        self._lock = threading.Lock()

    def ring(self) -> None:
        """Wake the others that sleep, after this rank has posted something."""
        cells = self._cells
        for place, address in self._others:
            if cells[place]:
                cells[place + 1] += 1
                futex.wake(address)

    def rest(self, ready: Callable[[], bool], seconds: float) -> None:
        """Sleep until another rank posts something, at most so long, unless `ready`."""
        with self._lock:
            self._asleep += 1
            self._cells[self._mine] = 1
        try:
            heard = self._cells[self._mine + 1]
            if not ready():
                futex.wait(self._address, heard, seconds)
        finally:
            with self._lock:
                self._asleep -= 1
                if not self._asleep:
                    self._cells[self._mine] = 0
