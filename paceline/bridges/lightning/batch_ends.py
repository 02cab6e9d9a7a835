"""Ends turns and epochs of loaders where a Trainer's loops end batches."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks.callback import Callback
from lightning.pytorch.callbacks.checkpoint import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from paceline.bridges.bridge_run import BridgeRun
from paceline.bridges.lightning.batch_counts import BatchCounts, note_counts, uncount_batch
from paceline.bridges.lightning.loader import LightningLoader


class BatchEnds(Callback):
    """A callback that ends the turn of each batch.

    It comes after all other callbacks but those that write checkpoints, so that values logged by
    callbacks belong to the batch, and checkpoints have its step.

        on_train_batch_start       counters are noted, if workers may be lost
        training_step, backward, optimizer.step
        on_train_batch_end         other callbacks; the turn ends; checkpoints
        validation, if it is due

    Args:
        bridge: The run.
    """

    def __init__(self, bridge: BridgeRun) -> None:
        self._bridge = bridge
        self._before: BatchCounts | None = None
        # Whether a step of the module has begun, and its batch hasn't ended. Values of a whole
        # epoch may be reduced while the turn of the next loader's first batch is under way.
        self.in_batch = False

    def begin_batch(self) -> None:
        """Note that a step of the module begins."""
        self.in_batch = True

    def join_trainer(self, trainer: Any) -> None:
        """Become a callback of the trainer, unless this is one already."""
        if self in trainer.callbacks:
            return
        places = [
            place for place, each in enumerate(trainer.callbacks) if isinstance(each, Checkpoint)
        ]
        trainer.callbacks.insert(places[0] if places else len(trainer.callbacks), self)

    def note_batch(self, trainer: Any) -> None:
        """Note how far the trainer has counted, as a training batch begins."""
        if self._bridge.survives:
            self._before = note_counts(trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """End the turn of a training batch, and the epoch with its last batch."""
        self.in_batch = False
        (loader,) = trainer.fit_loop._combined_loader.flattened
        failed = loader.shares.end_turn()
        rank_zero_only.rank = self._bridge.run.rank  # ranks change when workers are lost
        if failed:
            assert self._before is not None, "only runs that survive losses repeat batches"
            uncount_batch(trainer, self._before)
        elif trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            loader.shares.end_epoch()
        if self._bridge.loop.stopped:
            trainer.should_stop = True

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        """End the turn of a validation batch."""
        self.in_batch = False
        fitting = trainer.state.fn == TrainerFn.FITTING
        _end_turns(trainer.fit_loop.epoch_loop.val_loop if fitting else trainer.validate_loop)

    def on_test_batch_end(self, trainer: Any, *_: Any) -> None:
        """End the turn of a test batch."""
        self.in_batch = False
        _end_turns(trainer.test_loop)


def _end_turns(loop: Any) -> None:
    """End the turns of an evaluation's batch, and the epoch of each loader that is through."""
    for loader in reversed(loop._combined_loader.flattened):
        if not isinstance(loader, LightningLoader):
            continue
        # loaders one after the other: an earlier one was left after its last batch
        is_through = loader.shares.under_way and loader.shares.turn is None
        loader.shares.end_turn()
        if is_through or loop.batch_progress.is_last_batch:
            loader.shares.end_epoch()
