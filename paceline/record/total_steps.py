"""Estimates how many steps a run will take, for the time left, and tracks the current epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.data.loader import ShareLoader


class TotalSteps:
    """Reports the total number of steps and the current epoch to `tell`.

    The total is None if it isn't known. The epoch is counted from 1, with the number of epochs.

    `given` is the total that the script has stated, which holds. Otherwise the total is the number
    of epochs times the lengths of the loaders whose turns are steps. If only one loader may train,
    it is known from the start. If there are several (one for training and one for validation, or
    two that take turns), each is known from its first step on.
    """

    def __init__(
        self, given: int | None, tell: Callable[[int | None, tuple[int, int] | None], None]
    ) -> None:
        self._given, self._tell = given, tell
        self._epochs = 0
        self._total_steps, self._epoch = given, 0
        self._leading_loaders: list[ShareLoader] = []
        self._report_total(given)

    def begin_training(self, epochs: int, loaders: Sequence[ShareLoader]) -> None:
        """Begin a training of several epochs, led by some of these loaders."""
        self._epochs, self._epoch, self._leading_loaders = epochs, 0, []
        training_loaders = [loader for loader in loaders if loader.terms.train is not False]
        if len(training_loaders) == 1:
            self.add_leading_loader(training_loaders[0])
        elif self._given is None:
            self._report_total(None)

    def add_leading_loader(self, loader: ShareLoader) -> None:
        """Note that a turn of this loader is a step. Called at each turn."""
        if loader in self._leading_loaders or self._given is not None or not self._epochs:
            return
        self._leading_loaders.append(loader)
        lengths = [
            length for leading in self._leading_loaders if (length := leading.length) is not None
        ]
        # A loader without a known length makes the total unknown.
        self._report_total(
            self._epochs * sum(lengths) if len(lengths) == len(self._leading_loaders) else None
        )

    def begin_epoch(self, number: int) -> None:
        """Set the current epoch, counted from 0."""
        self._epoch = number + 1
        self._report_total(self._total_steps)

    def _report_total(self, steps: int | None) -> None:
        """Report the total and the epoch."""
        self._total_steps = steps
        self._tell(steps, (self._epoch, self._epochs) if self._epoch else None)
