"""Limits a run from outside to a number of steps or seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from paceline.cluster.discover import Place


class RunLimit:
    """Calls `stop` once this worker has used up the steps or seconds that its `Place` allows.

    Steps of an earlier run that this one resumes don't count, and seconds count from the end of the
    first step.
    """

    def __init__(
        self, place: Place, stop: Callable[[], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._steps, self._seconds, self._stop, self._clock = (
            place.most_steps,
            place.most_seconds,
            stop,
            clock,
        )
        self._taken = 0
        self._began: float | None = None

    def step_ended(self, step: int, samples: int, seconds: Mapping[str, float]) -> None:
        """Count a step, and stop if it is the last one that is allowed."""
        now = self._clock()
        self._taken += 1
        self._began = now if self._began is None else self._began
        if (self._steps is not None and self._taken >= self._steps) or (
            self._seconds is not None and now - self._began >= self._seconds
        ):
            self._stop()
