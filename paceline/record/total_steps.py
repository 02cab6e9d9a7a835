"""How many steps a run will take, as far as that is known, to estimate the time left; and which
epoch is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.data.loader import ShareLoader


class TotalSteps:
    """Calls `tell` with the number of steps in all (None: not known), and the epoch: which, from 1
    on, and of how many.

    `given`: the number that the script says, which holds. Else it is that of the epochs times the
    lengths of the loaders whose turns are steps. The only one that may train is known from the
    start; of several (one for training and one for validation, or two that take turns) each is
    known from its first step on.
    """

    def __init__(
        self, given: int | None, tell: Callable[[int | None, tuple[int, int] | None], None]
    ) -> None:
        self._given, self._tell = given, tell
        self._epochs = 0
        self._known, self._epoch = given, 0
        self._leading: list[ShareLoader] = []
        self._say(given)

    def begin(self, epochs: int, loaders: Sequence[ShareLoader]) -> None:
        """Begin a training of so many epochs, led by one of these loaders."""
        self._epochs, self._epoch, self._leading = epochs, 0, []
        possible = [loader for loader in loaders if loader.terms.train is not False]
        if len(possible) == 1:
            self.led(possible[0])
        elif self._given is None:
            self._say(None)

    def led(self, loader: ShareLoader) -> None:
        """Note that a turn of this loader is a step. Called at each of them."""
        if loader in self._leading or self._given is not None or not self._epochs:
            return
        self._leading.append(loader)
        lengths = [length for each in self._leading if (length := each.length) is not None]
        self._say(self._epochs * sum(lengths) if len(lengths) == len(self._leading) else None)

    def epoch_begins(self, number: int) -> None:
        """Note that this epoch is under way, counted from 0."""
        self._epoch = number + 1
        self._say(self._known)

    def _say(self, steps: int | None) -> None:
        self._known = steps
        self._tell(steps, (self._epoch, self._epochs) if self._epoch else None)
