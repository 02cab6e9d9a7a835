"""Metrics of torchmetrics: each worker hands over its own state, and the first combines them.

worker 0   right 7 of 8 --+
worker 1   right 5 of 7 --+--> right 12 of 15, reduced as     --> compute() on the first worker
worker 2   (a ghost)  --+      the metric reduces its states      --> 0.8

A worker whose metric has seen no samples is left out. torchmetrics is never imported here, because
a script that has a metric has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.record.logged.host_copy import HostCopy
from paceline.state.snapshot import make_snapshot, snapshot_from_bytes

TORCHMETRICS: Final = "torchmetrics"
# Private attributes of torchmetrics.Metric that compute() reads besides the state: the number of
# updates, the cached value, and whether to synchronise. If torchmetrics renames one, `getattr` in
# `_merge_states` raises AttributeError.
_COMPUTE_ATTRIBUTES: Final = ("_update_count", "_computed", "_to_sync")
_MAX_NUMBERS: Final = 100  # numbers in one value


def is_metric(value: Any) -> bool:
    """Whether `value` is a metric, a collection of metrics, or a tracker of metrics."""
    home = sys.modules.get(TORCHMETRICS)
    return home is not None and isinstance(
        value, (home.Metric, home.MetricCollection, home.MetricTracker)
    )


def find_metrics(metric: nn.Module) -> list[Any]:
    """Return all metrics inside a metric, itself included, in the same order on all workers."""
    torchmetrics = sys.modules[TORCHMETRICS]
    modules = list(metric.modules())
    for collection in (
        module for module in modules if isinstance(module, torchmetrics.MetricCollection)
    ):
        # Metrics of a compute group share the state of one of them. This gives it to the others.
        collection.values(copy_state=False)
    return [module for module in modules if isinstance(module, torchmetrics.Metric)]


class HeldMetricState:
    """The current state of a worker's metric, on its way to the host."""

    def __init__(self, metric: nn.Module) -> None:
        self._parts = [
            (
                part.update_count,
                {name: _copy_state(state) for name, state in part.metric_state.items()},
            )
            for part in find_metrics(metric)
        ]

    def has_arrived(self) -> bool:
        """Whether all copies have arrived, so that packing would not wait."""
        held = (
            copy
            for _, states in self._parts
            for state in states.values()
            for copy in (state if isinstance(state, list) else [state])
        )
        return all(copy.has_arrived() for copy in held)

    def pack_state(self) -> bytes:
        """Return the bytes that the first worker needs."""
        return make_snapshot(
            [
                [count, {name: _read_state(state) for name, state in states.items()}]
                for count, states in self._parts
            ],
            copy=False,
        ).to_bytes()


def _copy_state(state: Tensor | list[Tensor]) -> HostCopy | list[HostCopy]:
    """Start to copy a state, which is a tensor or a list of tensors, to the host."""
    return (
        HostCopy(state.detach())
        if isinstance(state, Tensor)
        else [HostCopy(each.detach()) for each in state]
    )


def _read_state(state: HostCopy | list[HostCopy]) -> Tensor | list[Tensor]:
    """Return a state that was copied to the host."""
    return (
        [each.read_tensor() for each in state] if isinstance(state, list) else state.read_tensor()
    )


class MetricValues:
    """The metrics that this worker has logged, to compute values from all workers' states."""

    def __init__(self) -> None:
        self._metrics: dict[str, nn.Module] = {}

    def register_metric(self, name: str, metric: nn.Module) -> None:
        """Remember the metric that is logged under this name."""
        self._metrics[name] = metric

    def compute_values(self, name: str, states: Sequence[bytes]) -> dict[str, float]:
        """Compute the value of a metric from the states of all workers.

        Args:
            name: Name that the metric was logged under.
            states: Packed state of each worker that has logged it.

        Returns:
            One number, or one for each name or place in the value; nothing if no worker has
            counted.

        Raises:
            UsageError: The value has too many numbers, or this worker hasn't logged the metric.
        """
        metric = self._metrics.get(name)
        if metric is None:
            raise UsageError(
                f"run.log({name}=...) got a metric on other workers but "
                "not on the first one, which combines them; log it on all workers"
            )
        workers = [snapshot_from_bytes(state).unpack_state() for state in states]
        if not any(count for worker in workers for count, _ in worker):
            return {}
        with _merge_states(find_metrics(metric), workers):
            values = dict(_flatten_value(name, metric.compute()))  # type: ignore[operator]
        if len(values) > _MAX_NUMBERS:
            raise UsageError(
                f"run.log({name}=...) got a {type(metric).__qualname__}, whose value is "
                f"{len(values)} numbers; log those that matter, "
                "such as run.log(worst=metric.compute().min())"
            )
        return values


@contextmanager
def _merge_states(metrics: Sequence[Any], workers: Sequence[Any]) -> Iterator[None]:
    """Give metrics of this worker the combined states of all workers, inside of the block.

    Their own states are put back at the end.
    """
    saved = [
        {**part.metric_state, **{name: getattr(part, name) for name in _COMPUTE_ATTRIBUTES}}
        for part in metrics
    ]
    try:
        for index, part in enumerate(metrics):
            worker_states = [worker[index] for worker in workers]
            # A worker without updates still has the initial state, which would distort a mean.
            updated_states = [states for count, states in worker_states if count] or [
                worker_states[0][1]
            ]
            # `_reductions` is private: the function of each state as given to `add_state`. If
            # torchmetrics renames it, this raises AttributeError.
            states = {
                name: _reduce_states(reduction, [each[name] for each in updated_states])
                for name, reduction in part._reductions.items()
            }
            attributes = dict(
                zip(
                    _COMPUTE_ATTRIBUTES,
                    (sum(count for count, _ in worker_states), None, False),
                    strict=True,
                )
            )
            _set_attributes(
                part,
                {name: _move_state(state, part.device) for name, state in states.items()}
                | attributes,
            )
        yield
    finally:
        for part, saved_values in zip(metrics, saved, strict=True):
            _set_attributes(part, saved_values)


def _set_attributes(part: Any, values: Mapping[str, Any]) -> None:
    """Set several attributes of a metric."""
    for name, value in values.items():
        setattr(part, name, value)


def _reduce_states(reduction: Callable[[Any], Any] | None, states: Sequence[Any]) -> Any:
    """Reduce the states of several workers as torchmetrics does when it synchronises."""
    if len(states) == 1:
        return states[0]
    # List states are concatenated, and tensors are stacked along a new first dim. `None` means no
    # reduction.
    joined = (
        [each for state in states for each in state]
        if isinstance(states[0], list)
        else torch.stack(list(states))
    )
    return (
        joined
        if reduction is None or (isinstance(joined, list) and not joined)
        else reduction(joined)
    )


def _move_state(state: Any, device: torch.device) -> Any:
    """Move a state to a device."""
    return (
        [each.to(device) for each in state] if isinstance(state, list | tuple) else state.to(device)
    )


def _flatten_value(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers in a value, each with a name of its own, such as `name/class/0`."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten_value(f"{name}/{key}", item)
    elif isinstance(value, Tensor) and value.numel() == 1:
        yield name, float(value.detach())
    elif isinstance(value, Tensor | list | tuple):
        for place, item in enumerate(value):
            yield from _flatten_value(f"{name}/{place}", item)
    else:
        yield name, float(value)
