"""Pipelines whose split is found again between two epochs of training, before the first batch of the second."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.parallel.pipelining.model import is_copy
from paceline.session.loop.turns import TrainingLoop
from paceline.session.prepare.cuts import ModelCuts
from paceline.state.versioned import Versioned


class EpochSplits:
    """Has the splits of a run found again, and strategies begin anew with what is here then. `state` is that of the run."""

    def __init__(self, loop: TrainingLoop, cuts: ModelCuts, optimizers: Sequence[Optimizer], state: Versioned) -> None:
        self._loop, self._cuts, self._optimizers, self._state = loop, cuts, optimizers, state
        self._steps: int | None = None  # where the epoch before began

    def epoch_began(self) -> None:
        """Split again, if a cut asks for it and an epoch of training was before this one. Collective.

        Raises `UsageError`, in the first epoch, where something keeps copies of parameters, which wouldn't follow them to other workers.
        """
        loop = self._loop
        if not self._cuts.repeated:
            return
        self._check_strategy()
        self._check_copies()
        turn = loop.training
        if (turn is not None and turn.train) or loop.backward.owing:  # gradients are under way
            return
        before, self._steps = self._steps, loop.steps
        if before is None or before == loop.steps:
            return
        if found := [text for split in self._cuts.repeated if (text := split.improve(self._optimizers)) is not None]:
            loop.backward.watch(loop.backward.unwatch())
            for text in found:
                self._cuts.tell(text)

    def _check_strategy(self) -> None:
        """Raise `UsageError` for a strategy that keeps copies of parameters."""
        sync = self._loop.backward.sync
        if sync.replicas_diverge or not sync.exchanges_in_backward or self._loop.abilities.remote is not None:
            raise UsageError(
                "again=True moves parameters between workers, and this strategy keeps copies of them: use AllReduce, or leave it out"
            )

    def _check_copies(self) -> None:
        """Raise `UsageError` for a copy of a model whose parameters move, as an average of them is."""
        for name, part in zip(self._state.names, self._state.parts, strict=True):
            if isinstance(part, nn.Module) and is_copy(part):
                raise UsageError(
                    f"{name} has a copy of a model whose split is found again (again=True), and parameters of copies stay where they are: "
                    "leave out again=True, or the copy"
                )
