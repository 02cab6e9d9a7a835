"""How far a Trainer has counted: noted before a batch, and set back if the batch has failed.

If a worker is lost, nothing steps in the turn, and its batch is dealt again among those left. The
Trainer has counted it by then. Without this it would stop the epoch one batch early.

This module uses private parts of Lightning 2.6: the progress objects of its loops, the counters of
its fetcher and `_skip_next_val`. If they go, the test that kills a worker fails.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class BatchCounts:
    """Counters of a Trainer as a batch begins, and the values logged before it."""

    progress: dict[str, Any]  # states by name
    logged: dict[str, dict[str, Tensor]]


def _list_progress(trainer: Any) -> dict[str, Any]:
    loop = trainer.fit_loop.epoch_loop
    return {
        "batches": loop.batch_progress,
        "schedulers": loop.scheduler_progress,
        "automatic": loop.automatic_optimization.optim_progress,
        "manual": loop.manual_optimization.optim_step_progress,
    }


def note_counts(trainer: Any) -> BatchCounts:
    """Note the counters in `on_train_batch_start`, where the batch counts as ready."""
    states = {name: part.state_dict() for name, part in _list_progress(trainer).items()}
    return BatchCounts(copy.deepcopy(states), trainer.fit_loop.epoch_loop._results.copy_values())


def uncount_batch(trainer: Any, before: BatchCounts) -> None:
    """Set the counters back in `on_train_batch_end`: the batch comes again as the next one.

    Lightning counts the batch as completed after this, and looks whether to validate.
    """
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    for name, part in _list_progress(trainer).items():
        part.load_state_dict(copy.deepcopy(before.progress[name]))
    for counts in (loop.batch_progress.total, loop.batch_progress.current):
        counts.ready -= 1
        counts.completed -= 1
    loop.batch_progress.is_last_batch = False
    fetcher.fetched -= 1
    fetcher.done = False
    loop._results.restore_values(before.logged)
    # what follows in Lightning's loop sees the counters of the batch before, which was handled
    loop._skip_next_val = True
    if not loop._should_accumulate():
        loop._batches_that_stepped -= 1
