"""The loaders that have a turn under way, and which of their turns is which.

Several loaders may be under way at once. The training loader whose turn began while no other
trained leads: its turns are the steps.

    train  |--- turn 0 ----------------|--- turn 1 ---    for x in train:         leads
    test         |--|--|--|                                   for v in test: evaluation in a turn
    other      |-----------------------|--------------        u = next(others): a second training
                                                              loader
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from paceline.data.loader import ShareLoader, Turn
from paceline.data.spec import LoaderSpec
from paceline.loop.iteration import LoaderProgress, find_innermost_turn


class OpenTurns:
    """Turns under way.

    Attributes:
        under_way: Loaders with a turn, in the order in which their turns began.
        leader: The one of them whose turns are the steps, or None.
        by_loader: The progress of every loader that was iterated, by id of the loader.
        moments: Numbers the beginnings of epochs and turns in their order.
    """

    def __init__(self) -> None:
        self.under_way: list[LoaderProgress] = []
        self.leader: LoaderProgress | None = None
        self.by_loader: dict[int, LoaderProgress] = {}
        self.moments: Iterator[int] = itertools.count(1)

    def progress_of(self, loader: ShareLoader) -> LoaderProgress:
        """Progress of a loader, which begins with its first epoch."""
        return self.by_loader.setdefault(id(loader), LoaderProgress(loader))

    def lead_by(self, progress: LoaderProgress | None) -> None:
        """Let the turns of this loader be the steps from now on; of none if None."""
        self.leader = progress

    @property
    def current(self) -> Turn | None:
        """The innermost turn under way.

        A turn left by `break` counts only if no other is under way.
        """
        return find_innermost_turn(self.under_way)

    @property
    def training(self) -> Turn | None:
        """Turn that backward passes and optimizers belong to.

        It is the innermost training turn, or else the innermost turn.
        """
        if len(self.under_way) < 2:
            return find_innermost_turn(self.under_way)
        training = [
            progress
            for progress in self.under_way
            if progress.turn is not None and progress.turn.train
        ]
        return find_innermost_turn(training) or find_innermost_turn(self.under_way)

    @property
    def leading(self) -> Turn | None:
        """The turn of the leading training loader: the step under way."""
        return None if self.leader is None else self.leader.turn

    @property
    def innermost(self) -> LoaderProgress | None:
        """The loader of the innermost turn; None if no turn is under way."""
        turn = self.current
        return next(
            (progress for progress in reversed(self.under_way) if progress.turn is turn), None
        )

    def terms_of(self, turn: Turn | None) -> LoaderSpec | None:
        """How the loader of this turn deals its batches; None without a turn."""
        return next(
            (
                progress.loader.terms
                for progress in self.under_way
                if turn is not None and progress.turn is turn
            ),
            None,
        )

    @property
    def in_training_loop(self) -> bool:
        """Whether the loop over a training loader is under way."""
        return any(
            progress.loader.terms.training and progress.loader.under_way
            for progress in self.under_way
        )

    def left_by_break(self) -> list[LoaderProgress]:
        """Training loaders whose loop was left by `break`."""
        return [
            progress
            for progress in self.under_way
            if progress.loader.terms.training and not progress.loader.under_way
        ]
