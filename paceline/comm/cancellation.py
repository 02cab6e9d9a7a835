"""Cancels the waits of some groups from another thread; the other workers are not told, as they
learn of the new view by themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from paceline.errors import PacelineError


class CancelScope:
    """Ends every wait of the groups made with it, and of those made with it later, when `trip`
    is called.
    """

    def __init__(self) -> None:
        self.error: PacelineError | None = None
        self._lock = threading.Lock()
        self._ends: list[Callable[[PacelineError], None]] = []

    def add(self, end: Callable[[PacelineError], None]) -> None:
        """Call `end` when the scope trips; at once if it has."""
        with self._lock:
            if self.error is None:
                self._ends.append(end)
                return
        end(self.error)

    def trip(self, error: PacelineError) -> None:
        """End every wait with `error`; only the first call counts."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            ends, self._ends = self._ends, []
        for end in ends:
            end(error)
