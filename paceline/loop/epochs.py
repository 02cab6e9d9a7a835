"""Epochs of loaders, from the request for one to its end. Their turns go to the training step."""

from __future__ import annotations

from collections.abc import Callable

from paceline.data.loader import ShareLoader, Turn
from paceline.loop.step import TrainingStep
from paceline.sync.transaction import Transaction


class LoaderEpochs:
    """Follows the loaders of a run, as their `LoaderObserver`."""

    def __init__(self, step: TrainingStep) -> None:
        self._loop = step.loop
        self.changes = False  # the membership may change
        self._generation_of: Callable[[ShareLoader], int] = lambda loader: 0
        # handed on without a call in between, as each step comes here twice
        self.begin_turn: Callable[[ShareLoader, Turn], None] = step.begin_turn
        self.end_turn: Callable[[ShareLoader], None] = step.end_turn

    def recover_by(
        self, transaction: Transaction, generation_of: Callable[[ShareLoader], int]
    ) -> None:
        """Deal turns again that fail, which `transaction` rolls back.

        `generation_of`: as `LoaderObserver.generation`.
        """
        self.changes, self._generation_of = True, generation_of
        self._loop.backward.recover_by(transaction)

    def generation(self, loader: ShareLoader) -> int:
        """How often the workers that this loader deals to have changed."""
        return self._generation_of(loader)

    def begin_training(self) -> None:
        """Tell the observers that all workers are about to train."""
        for observer in self._loop.observers.training_begins:
            observer()

    def prepare_epoch(self, loader: ShareLoader) -> None:
        """Prepare for an epoch, before all workers meet for it."""
        if loader.terms.training:
            self.begin_training()
        self._loop.idle_epochs.prepare_epoch(loader)

    def begin_epoch(self, loader: ShareLoader) -> None:
        """Begin an epoch."""
        loop, training = self._loop, loader.terms.training
        if not training:
            loop.abilities.converge()  # replicas are evaluated as one
        progress = loop.turns.progress_of(loader)
        progress.begin_epoch(next(loop.turns.moments))
        loop.note_ghosts(ghosts=loop.had_ghosts and bool(loop.turns.under_way))
        if training:
            self.end_left()
            loop.batch_use.begin_epoch(progress)
            loop.idle_epochs.begin_epoch(progress.activity)
            if loop.stopped:
                loader.finish_epoch()
            for observer in loop.observers.epoch_began:
                observer()
        # time before this, as of an evaluation, is not part of the first step
        loop.clock.interruptions.take_interruptions(0.0)
        loop.clock.begin_waiting()

    def end_epoch(self, loader: ShareLoader) -> None:
        """End an epoch that was run through, or left by `break`."""
        loop = self._loop
        progress = loop.turns.by_loader[id(loader)]
        if loop.turns.leader is progress:
            loop.turns.lead_by(None)
        if loader.terms.training:
            loop.batch_use.end_epoch(progress)
            loop.idle_epochs.end_epoch(progress.activity, whole=loader.ran_through)
        if loop.apart:
            # workers come together, with the same parameters
            loop.context.agreement.lockstep.bring_together()

    def end_left(self) -> None:
        """End the turns, and the lead, of training loops that were left by `break`.

        All workers call it at the same place.
        """
        turns = self._loop.turns
        for progress in turns.left_by_break():
            self.end_turn(progress.loader)
            self._loop.idle_epochs.flush_held_steps(progress.activity)
        if turns.leader is not None and not turns.leader.loader.under_way:
            turns.lead_by(None)

    def finish(self) -> None:
        """End the run: close the turns that a `break` left open, and make replicas equal."""
        for progress in list(self._loop.turns.under_way):
            self.end_turn(progress.loader)
            self._loop.idle_epochs.flush_held_steps(progress.activity)
        self._loop.abilities.converge()
