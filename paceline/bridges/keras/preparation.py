"""Prepares a compiled Keras model and its loaders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypedDict, Unpack

import keras
from torch.utils.data import DataLoader, IterableDataset

from paceline.bridges.keras.batches import SharedBatches, check_metrics
from paceline.bridges.keras.optimizer import check_keras, make_steps
from paceline.data.costs import Cost
from paceline.data.shares import RequestedShares
from paceline.data.spec import Weigh
from paceline.errors import UsageError
from paceline.prepare.binding import rebind_method
from paceline.session.run import Run, parts_of_run

MEANS: Final = ("sum_over_batch_size", "mean")
OF_LOADERS: Final = "the loaders that prepare returned have the data of all workers"


class KerasOptions(TypedDict, total=False):
    """Options of `run.prepare` that hold for Keras, too."""

    shares: RequestedShares
    weigh: Weigh
    cost: Cost


def prepare(
    run: Run, model: Any, *loaders: DataLoader[Any], **options: Unpack[KerasOptions]
) -> Any:
    """Prepare a compiled Keras model, and deal its loaders to all workers. Collective.

    >>> train, test = prepare(run, model, train, test)
    >>> model.fit(train, validation_data=test, epochs=3)

    All workers get the first one's weights. The batch size of a loader is that of all workers
    together, and losses and metrics of an epoch are those of all samples.

    Args:
        run: The run of `pl.start`.
        model: A model that was compiled with a `DistributedOptimizer`. A model that isn't built yet
            is built by the first sample of the first loader.
        loaders: DataLoaders of torch whose batches are (inputs, targets) or (inputs, targets,
            sample weights).
        options: `shares`, `weigh` and `cost`, as in `run.prepare`.

    Returns:
        The data for `fit` and `evaluate`; a tuple if there are several loaders.

    Raises:
        UsageError: The model, its loss, a metric or an option can't be honoured.
    """
    check_keras()
    _check_run(run)
    _check_model(model)
    for loader in loaders:
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            raise UsageError(
                "prepare takes DataLoaders of torch over data sets with a length, and got a "
                f"{type(getattr(loader, 'dataset', loader)).__qualname__}: put arrays into "
                "DataLoader(TensorDataset(x, y), batch_size=...)"
            )
    if loaders:
        _build_model(model, loaders[0])
    check_metrics(model)
    _check_layers(model)
    run.prepare(model, make_steps(model))
    dealt = []
    for loader in loaders:
        # An empty share is a ghost in evaluation, too: Keras would compute means over no rows.
        prepared: Any = run.prepare(loader, pad=True, **options)
        dealt.append(SharedBatches(run, model, prepared))
    rebind_method(model, "fit", _refuse_ignored, parts_of_run(run).loop)
    return dealt[0] if len(dealt) == 1 else tuple(dealt)


def _check_run(run: Run) -> None:
    parts = parts_of_run(run)
    if parts.survival is not None:
        raise UsageError(
            "model.fit counts a turn that is dealt again as another one, so a Keras model can't "
            "train under --min-workers: use --restarts, with run.resume()"
        )
    if parts.loop.abilities.remote is not None:
        raise UsageError(
            "an optimizer of Keras can't step on servers, as ParameterServer has it: use "
            "AllReduce, LocalSGD or Gossip"
        )
    if parts.axes.cut_axes or parts.prepared.cuts.choose_cuts(None):
        raise UsageError(
            "layers of Keras can't be cut by paceline: leave out --mesh and --cut, so that each "
            "worker has the whole model"
        )


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise UsageError(
            f"prepare got a {type(model).__module__}.{type(model).__qualname__}, and takes a "
            "compiled keras.Model; run.prepare takes models of torch"
        )
    if not model.compiled:
        raise UsageError(
            "the model isn't compiled: call "
            "model.compile(optimizer=DistributedOptimizer(...), loss=...) before prepare"
        )
    if model.jit_compile:
        raise UsageError(
            "jit_compile=True compiles forward and backward into one, and gradients are exchanged "
            "in between: leave it out of model.compile"
        )
    for loss in keras.tree.flatten(model.loss):
        reduction = getattr(loss, "reduction", "sum_over_batch_size")
        if reduction not in MEANS:
            raise UsageError(
                f"the loss {loss.name} has the reduction {reduction!r}: workers combine means "
                "over samples, so use 'sum_over_batch_size'"
            )


def _check_layers(model: Any) -> None:
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
            raise UsageError(
                f"the layer {layer.name} takes statistics of one worker's share of a batch: use "
                "GroupNormalization or LayerNormalization, or freeze it (layer.trainable = False)"
            )


def _build_model(model: Any, loader: DataLoader[Any]) -> None:
    """Build model, metrics and optimizer with one sample; Keras would take a batch of the epoch."""
    collate: Callable[[list[Any]], Any] = loader.collate_fn or (lambda samples: samples[0])
    inputs, *targets = collate([loader.dataset[0]])
    model.test_on_batch(inputs, *targets)


def _refuse_ignored(own: Callable[..., Any]) -> Callable[..., Any]:
    """Let `fit` refuse what Keras would ignore beside prepared data."""

    def fit(self: Any, x: Any = None, *args: Any, **options: Any) -> Any:
        if not isinstance(x, SharedBatches):
            raise UsageError(
                f"fit got a {type(x).__qualname__}, and each worker would train on all of it: "
                f"{OF_LOADERS}"
            )
        ignored = ("y", "batch_size", "class_weight", "sample_weight", "steps_per_epoch")
        given = [name for name in ignored if options.get(name) is not None]
        if args or given:
            raise UsageError(
                f"fit got {', '.join(given) or 'arguments without a name'} beside prepared data, "
                f"which Keras ignores or counts for one worker alone: {OF_LOADERS}"
            )
        return own(self, x, **options)

    return fit
