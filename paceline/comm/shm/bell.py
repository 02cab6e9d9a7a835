"""Wakes ranks of a segment that sleep. Each rank has a bell there: a number that others change.

    rank 0 sleeps:  sleeps = 1 | reads its bell | looks once more | sleeps until the bell changes
    rank 1 posts:   its counter | looks which ranks sleep | rank 0's bell + 1, and wakes it

A wake-up may be lost if both look at the same moment: a processor may let a load pass an earlier
store, so rank 1 may not see `sleeps` yet while rank 0 does not see the counter yet. A fence would
prevent it, but Python has none. So sleeps are short.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from paceline.comm.shm import futex


class Bell:
    """The bell of one rank.

    Args:
        cells: The segment as int64.
        start: Address of the segment.
        places: Cell of each rank at which its two cells, `sleeps` and the bell, begin.
        rank: This rank.
    """

    def __init__(self, cells: memoryview, start: int, places: Sequence[int], rank: int) -> None:
        self._cells, self._own_cell, self._address = (
            cells,
            places[rank],
            start + 8 * (places[rank] + 1),
        )
        self._others = [
            (place, start + 8 * (place + 1)) for other, place in enumerate(places) if other != rank
        ]
        self._asleep = 0  # threads of this rank that sleep; `sleeps` is 1 while there are any
        self._lock = threading.Lock()

    def ring(self) -> None:
        """Wake the other ranks that sleep. Call it after this rank has posted something."""
        cells = self._cells
        for place, address in self._others:
            if cells[place]:
                cells[place + 1] += 1
                futex.futex_wake(address)

    def sleep_until_rung(self, ready: Callable[[], bool], seconds: float) -> None:
        """Sleep until another rank posts something, or `seconds` pass. Not if `ready()`."""
        with self._lock:
            self._asleep += 1
            self._cells[self._own_cell] = 1
        try:
            # The bell first, then the question: a post in between changes the bell, and the kernel
            # does not sleep if it no longer has this value.
            heard = self._cells[self._own_cell + 1]
            if not ready():
                futex.futex_wait(self._address, heard, seconds)
        finally:
            with self._lock:
                self._asleep -= 1
                if not self._asleep:
                    self._cells[self._own_cell] = 0
