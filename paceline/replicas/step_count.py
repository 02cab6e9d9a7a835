"""Counts steps of optimizers on this worker.

The counts travel with each meeting, as replicas diverge where one worker skips a step.
"""

from __future__ import annotations

from collections.abc import Callable


class StepCount:
    """Counts optimizer steps in the present step of training and in the one before.

    A step of training is a turn of the loader; without a loader, all is one step.
    """

    def __init__(self, steps: Callable[[], int], *, waits: bool = False) -> None:
        self._steps = steps  # of training, that are over
        self.at = 0  # the present step of training
        self.now = self._before = 0  # steps of optimizers in it, and in the one before
        self._sure = 0  # the first step of training that this worker has counted from its beginning
        self.waits = waits  # this worker isn't let in yet: nothing of it is compared

    def add(self) -> None:
        """Count a step of an optimizer."""
        steps = self._steps()
        if steps != self.at:
            self._move(steps)
        self.now += 1

    def doubt(self) -> None:
        """Leave this step and the next out of comparisons, as the workers have changed."""
        self._sure = self._steps() + 2

    def enter(self) -> None:
        """Begin on a worker that was let into a running job."""
        self.waits = False
        self.doubt()

    def told(self) -> list[int | None]:
        """The step of training, and the counts of the one before and of itself; None if unknown."""
        if (steps := self._steps()) != self.at:
            self._move(steps)
        at, sure = self.at, self.at + 2 if self.waits else self._sure
        return [at, self._before if at > sure else None, self.now if at >= sure else None]

    def _move(self, steps: int) -> None:
        self._before = self.now if steps == self.at + 1 else 0
        self.at, self.now = steps, 0
