"""Counts steps of optimizers on this worker.

The counts are exchanged at each meeting of all workers, because replicas diverge if one worker
skips a step.
"""

from __future__ import annotations

from collections.abc import Callable


class StepCount:
    """Counts optimizer steps in the current training step and in the one before.

    A training step is a turn of the loader. Without a loader, everything is one training step.

    Args:
        steps: Returns the number of training steps that are over.
        waits: Whether this worker waits to be let into a running job. It isn't compared until then.
    """

    def __init__(self, steps: Callable[[], int], *, waits: bool = False) -> None:
        self._steps = steps
        self.at = 0  # the current training step
        self.now = self._before = 0  # optimizer steps in it, and in the one before
        self._sure = 0  # first training step that was counted from its beginning
        self.waits = waits

    def add(self) -> None:
        """Count one optimizer step."""
        steps = self._steps()
        if steps != self.at:
            self._move(steps)
        self.now += 1

    def doubt(self) -> None:
        """Leave this training step and the next out, as the group of workers has changed."""
        self._sure = self._steps() + 2

    def enter(self) -> None:
        """Begin to count on a worker that was let into a running job."""
        self.waits = False
        self.doubt()

    def told(self) -> list[int | None]:
        """List of the training step, the count of the one before, and its own count.

        A count is None if it isn't known from the beginning of its step.
        """
        if (steps := self._steps()) != self.at:
            self._move(steps)
        step, first_sure = self.at, self.at + 2 if self.waits else self._sure
        return [
            step,
            self._before if step > first_sure else None,
            self.now if step >= first_sure else None,
        ]

    def _move(self, steps: int) -> None:
        self._before = self.now if steps == self.at + 1 else 0
        self.at, self.now = steps, 0
