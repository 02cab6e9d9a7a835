"""The share of each global batch that this worker gives to `model.fit` and `model.evaluate`.

fit: model.train()      iter: a training epoch begins
     train_step         a turn for each batch
     on_epoch_end       the last turn ends; metrics are summed over workers
     logs               are read from the metrics, so they are those of all samples
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import torch
from keras.metrics import Metric

# Private to Keras: there is no public name for the class of which `fit` takes any object as it is.
# If it moves, this raises an ImportError.
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from paceline.data.loader import ShareLoader
from paceline.errors import UsageError
from paceline.session.run import Run


class SharedBatches(DataAdapter):
    """Data of `fit` and `evaluate`: this worker's share of each global batch.

    Args:
        run: The run.
        model: The Keras model that is fitted.
        loader: The prepared loader.
    """

    def __init__(self, run: Run, model: Any, loader: ShareLoader) -> None:
        self._run, self._model, self._loader = run, model, loader
        self._epoch: Iterator[Any] | None = None  # under way
        self._next_epoch: Iterator[Any] | None = None  # not begun, or the one under way

    @property
    def epoch(self) -> int:
        """Number of epochs done, for `fit(initial_epoch=...)` after `run.resume()`."""
        return self._loader.epoch

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def num_batches(self) -> int:
        """Number of global batches in an epoch."""
        return len(self._loader)

    @property
    def batch_size(self) -> int | None:
        """Samples in a global batch."""
        size: int | None = self._loader.batch_size
        return size

    @property
    def has_partial_batch(self) -> None:
        """Keras needs no answer."""

    @property
    def partial_batch_size(self) -> None:
        """Keras needs no answer."""

    def get_torch_dataloader(self) -> SharedBatches:
        """Iterable that Keras goes through."""
        return self

    def __iter__(self) -> Iterator[Any]:
        # Keras asks for the next epoch before it tells that the present one is over, so an epoch
        # begins with its first batch.
        self._next_epoch = self._deal_epoch()
        return self._next_epoch

    def _deal_epoch(self) -> Iterator[Any]:
        self._epoch = self._next_epoch
        # Keras leaves gradients on while it asks for batches to evaluate.
        with torch.set_grad_enabled(bool(self._model.training)):
            batches = iter(self._loader)
        for batch in batches:
            # A worker without samples takes part with a sample that doesn't count.
            turn = self._loader.turn
            before = copy_metrics(self._model) if turn is not None and turn.ghost else None
            yield tuple(batch) if isinstance(batch, list) else batch
            if before is not None:
                restore_metrics(self._model, before)

    def on_epoch_end(self) -> None:
        """End the last turn, and sum the metrics of all workers. Collective at the end of an epoch.

        Keras calls this after the last batch, before it reads the metrics, and at the beginning of
        each fit.
        """
        epoch, self._epoch = self._epoch, None
        if not isinstance(epoch, Generator):
            return
        turn = self._loader.turn
        if turn is not None and turn.index + 1 < len(self._loader):
            epoch.close()  # an earlier fit was stopped inside of its epoch
            return
        for _ in epoch:
            raise AssertionError("Keras has left out a batch of its epoch")
        if self._run.size > 1:
            sum_metrics(self._run, self._model)


def list_metric_variables(model: Any) -> list[Any]:
    """List the variables of all metrics of a model, the mean of its loss among them."""
    return [variable for metric in model.metrics for variable in metric.variables]


def copy_metrics(model: Any) -> list[torch.Tensor]:
    """Copy the variables of all metrics of a model."""
    return [variable.value.detach().clone() for variable in list_metric_variables(model)]


def restore_metrics(model: Any, values: list[torch.Tensor]) -> None:
    """Set the variables of all metrics of a model to their copies."""
    for variable, value in zip(list_metric_variables(model), values, strict=True):
        variable.assign(value)


def sum_metrics(run: Run, model: Any) -> None:
    """Replace each metric's variables by their sums over all workers. Collective.

    The metrics of Keras keep counts and sums, so this makes them metrics of all samples.

    Raises:
        UsageError: A metric is of a class that isn't derived from one of Keras's metrics.
    """
    check_metrics(model)
    variables = list_metric_variables(model)
    flat = torch.cat([variable.value.detach().double().reshape(-1) for variable in variables])
    total = run.group.all_reduce(flat, name="metrics of Keras").wait()
    sizes = [variable.value.numel() for variable in variables]
    for variable, part in zip(variables, total.split(sizes), strict=True):
        variable.assign(part.reshape(variable.value.shape).to(variable.value.dtype))


def check_metrics(model: Any) -> None:
    """Raise `UsageError` for a metric whose variables may be something else than sums."""
    for metric in model.metrics:
        for part in getattr(metric, "metrics", [metric]):
            kinds = [kind for kind in type(part).__mro__ if issubclass(kind, Metric)]
            if not any(
                kind.__module__.startswith("keras.") and kind is not Metric for kind in kinds
            ):
                raise UsageError(
                    f"the metric {part.name} is of the class {type(part).__qualname__}, of which "
                    "nobody knows whether its variables can be summed over workers: derive it "
                    "from keras.metrics.Mean, or from another metric of Keras"
                )
