"""Pipelines whose split is found again between two epochs of training, before the first batch of the second."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.parallel.cut import Immovable, SplitAgain
from paceline.session.loop.turns import TrainingLoop
from paceline.session.prepare.cuts import ModelCuts


class EpochSplits:
    """Has the splits of a run found again, and strategies begin anew with what is here then."""

    def __init__(self, loop: TrainingLoop, cuts: ModelCuts, optimizers: Sequence[Optimizer]) -> None:
        self._loop, self._cuts, self._optimizers = loop, cuts, optimizers
        self._steps: int | None = None  # where the epoch before began

    def epoch_began(self) -> None:
        """Split again, if a cut asks for it and an epoch of training was before this one. Collective.

        Raises `UsageError`, in the first epoch, for a strategy that keeps what wouldn't follow parameters. A split whose parameters can't
        move stays as it is from then on, which is said.
        """
        loop = self._loop
        if not self._cuts.repeated:
            return
        self._check_strategy()
        turn = loop.training
        if (turn is not None and turn.train) or loop.backward.owing:  # gradients are under way
            return
        before, self._steps = self._steps, loop.steps
        if before is None or before == loop.steps:
            return
        if found := [text for split in list(self._cuts.repeated) if (text := self._improve(split)) is not None]:
            self._cuts.copies.place()
            loop.backward.watch(loop.backward.unwatch())
            for text in found:
                self._cuts.tell(text)

    def _improve(self, split: SplitAgain) -> str | None:
        try:
            return split.improve(self._optimizers, self._cuts.copies.of)
        except Immovable as error:  # on all workers
            self._cuts.repeated.remove(split)
            self._cuts.tell(f"the split stays as it is, and isn't found again: {error}")
            return None

    def _check_strategy(self) -> None:
        """Raise `UsageError` for a strategy that keeps copies of parameters, or something of their gradients."""
        sync, remembering = self._loop.backward.sync, self._loop.abilities.remembering
        if remembering is not None and remembering.remembers:
            raise UsageError(
                "again=True moves parameters between workers, and what the codec keeps of their gradients, such as residuals, can't go "
                "along: use a codec that keeps nothing, such as int8() without error_feedback, or leave out again=True"
            )
        if sync.replicas_diverge or not sync.exchanges_in_backward or self._loop.abilities.remote is not None:
            raise UsageError(
                "again=True moves parameters between workers, and this strategy keeps copies of them: use AllReduce, or leave it out"
            )
