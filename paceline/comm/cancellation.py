"""Ends what some groups wait for, from another thread, and without the other workers: they hear by themselves that the view has changed."""

from __future__ import annotations

import threading
from collections.abc import Callable

from paceline.errors import PacelineError


class CancelScope:
    """Groups are made with one; `trip` ends every wait in all of them, and in those that are made with it later."""

    def __init__(self) -> None:
        self.error: PacelineError | None = None
        self._lock = threading.Lock()
        self._ends: list[Callable[[PacelineError], None]] = []

    def add(self, end: Callable[[PacelineError], None]) -> None:
        """Call `end` when it trips; at once if it has."""
        with self._lock:
            if self.error is None:
                self._ends.append(end)
                return
        end(self.error)

    def trip(self, error: PacelineError) -> None:
        """End everything with `error`, once."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            ends, self._ends = self._ends, []
        for end in ends:
            end(error)
