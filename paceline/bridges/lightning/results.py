"""Logged values of a Trainer: samples of ghosts don't count, and a failed batch can be taken back.

A ghost is the first sample of a batch, given once more to a worker without samples of its own.
Lightning collects values of an epoch by itself, and weights each by the size of its batch:

    self.log(x, on_epoch=True)     value += x * batch_size     size += batch_size
    end of the epoch               reduce(value) / reduce(size), exact for uneven batches

This module uses private parts of Lightning 2.6: `_ResultCollection.update_metrics`, the
`_results` of loops, and `value` and `cumulated_batch_size` of `_ResultMetric`. If they go, tests of
logged values fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor

STATES = ("value", "cumulated_batch_size")


class SampleResults(_ResultCollection):
    """Values that loops log, without those of ghosts.

    Args:
        training: As of the class above.
        is_ghost: Whether the present batch is a ghost.
    """

    def __init__(self, training: bool, is_ghost: Callable[[], bool]) -> None:
        super().__init__(training=training)
        self.is_ghost = is_ghost

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Add a value of this batch to those of the epoch."""
        metric = self[key]
        if self.is_ghost() and metric.is_tensor and isinstance(value, Tensor):
            if metric.meta.is_mean_reduction:
                batch_size = 0
            elif metric.meta.is_sum_reduction:
                value = value * 0
            elif not metric.meta.on_step:  # a value that is reduced at once needs all workers
                return
        super().update_metrics(key, value, batch_size)

    def copy_values(self) -> dict[str, dict[str, Tensor]]:
        """Copy what was logged in this epoch so far."""
        return {
            key: {name: getattr(metric, name).clone() for name in STATES if hasattr(metric, name)}
            for key, metric in self.items()
            if metric.is_tensor
        }

    def restore_values(self, saved: dict[str, dict[str, Tensor]]) -> None:
        """Go back to values of `copy_values`; what was logged first since then begins anew."""
        for key, metric in self.items():
            if not metric.is_tensor:
                continue
            metric.reset()
            for name, value in saved.get(key, {}).items():
                setattr(metric, name, value)
            metric.has_reset = key not in saved


def count_samples_only(trainer: Any, is_ghost: Callable[[], bool]) -> None:
    """Let all loops of a Trainer collect their logged values in `SampleResults`."""
    epoch_loop = trainer.fit_loop.epoch_loop
    for loop in (epoch_loop, epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        loop._results = SampleResults(loop._results.training, is_ghost)
