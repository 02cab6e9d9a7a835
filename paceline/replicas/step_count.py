"""Counts steps of optimizers on this worker.

The counts travel with each meeting, as replicas diverge if one worker skips a step.
"""

from __future__ import annotations

from typing import Protocol


class TrainingPosition(Protocol):
    """A loop that counts the steps of training that are over."""

    steps_made: int


class StepCount:
    """Counts optimizer steps in the present step of training and in the one before.

    A step of training is a turn of the loader; without a loader, all is one step.

    Args:
        loop: Counts the steps of training.
        waits: This worker isn't let in yet, so nothing of it is compared. Default: False.
    """

    def __init__(self, loop: TrainingPosition, *, waits: bool = False) -> None:
        self._loop = loop
        self.training_step = 0  # the present step of training
        self.optimizer_steps = self._optimizer_steps_before = (
            0  # steps of optimizers in it, and in the one before
        )
        self._first_sure_step = (
            0  # the first step of training that this worker has counted from its beginning
        )
        self.is_waiting = waits

    def add_step(self) -> None:
        """Count a step of an optimizer."""
        steps = self._loop.steps_made
        if steps != self.training_step:
            self._optimizer_steps_before, self.training_step, self.optimizer_steps = (
                self.optimizer_steps if steps == self.training_step + 1 else 0,
                steps,
                0,
            )
        self.optimizer_steps += 1

    def skip_comparisons(self) -> None:
        """Leave this step and the next out of comparisons, as the workers have changed."""
        self._first_sure_step = self._loop.steps_made + 2

    def enter_job(self) -> None:
        """Begin on a worker that was let into a running job."""
        self.is_waiting = False
        self.skip_comparisons()

    def get_counts(self) -> list[int | None]:
        """The step of training, and the counts of the one before and of itself; None if unknown."""
        steps = self._loop.steps_made
        if steps != self.training_step:
            self._optimizer_steps_before, self.training_step, self.optimizer_steps = (
                self.optimizer_steps if steps == self.training_step + 1 else 0,
                steps,
                0,
            )
        at, sure = (
            self.training_step,
            self.training_step + 2 if self.is_waiting else self._first_sure_step,
        )
        return [
            at,
            self._optimizer_steps_before if at > sure else None,
            self.optimizer_steps if at >= sure else None,
        ]
