"""Cancels the waits of some groups from another thread, on this worker alone.

Other workers get no message: they learn of the new view in the same way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from paceline.errors import PacelineError


class CancelScope:
    """Ends every wait of the groups made with it once it trips, and of groups made after that."""

    def __init__(self) -> None:
        self.error: PacelineError | None = None
        self._lock = threading.Lock()
        self._ends: list[Callable[[PacelineError], None]] = []

    def register_end(self, end: Callable[[PacelineError], None]) -> None:
        """Register `end`, to be called when the scope trips; at once if it has."""
        with self._lock:
            if self.error is None:
                self._ends.append(end)
                return
        end(self.error)

    def trip(self, error: PacelineError) -> None:
        """End every wait with `error`. Only the first call counts."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            ends, self._ends = self._ends, []
        # Outside of the lock: an end may make a group with this scope, or drop one.
        for end in ends:
            end(error)
