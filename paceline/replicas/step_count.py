"""Counts steps of optimizers on this worker.

The counts travel with each meeting, as replicas diverge if one worker skips a step.
"""

from __future__ import annotations

from typing import Protocol


class TrainingPosition(Protocol):
    """A loop that counts the steps of training that are over."""

    steps: int


class StepCount:
    """Counts optimizer steps in the present step of training and in the one before.

    A step of training is a turn of the loader; without a loader, all is one step.

    Args:
        loop: Counts the steps of training.
        waits: This worker isn't let in yet, so nothing of it is compared. Default: False.
    """

    def __init__(self, loop: TrainingPosition, *, waits: bool = False) -> None:
        self._loop = loop
        self.at = 0  # the present step of training
        self.now = self._before = 0  # steps of optimizers in it, and in the one before
        self._sure = 0  # the first step of training that this worker has counted from its beginning
        self.waits = waits

    def add(self) -> None:
        """Count a step of an optimizer."""
        steps = self._loop.steps
        if steps != self.at:
            self._before, self.at, self.now = self.now if steps == self.at + 1 else 0, steps, 0
        self.now += 1

    def doubt(self) -> None:
        """Leave this step and the next out of comparisons, as the workers have changed."""
        self._sure = self._loop.steps + 2

    def enter(self) -> None:
        """Begin on a worker that was let into a running job."""
        self.waits = False
        self.doubt()

    def told(self) -> list[int | None]:
        """The step of training, and the counts of the one before and of itself; None if unknown."""
        steps = self._loop.steps
        if steps != self.at:
            self._before, self.at, self.now = self.now if steps == self.at + 1 else 0, steps, 0
        at, sure = self.at, self.at + 2 if self.waits else self._sure
        return [at, self._before if at > sure else None, self.now if at >= sure else None]
