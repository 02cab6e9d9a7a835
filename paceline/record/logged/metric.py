"""Metrics of torchmetrics that are logged: each worker hands over the state of its own, and the
first makes one value of all of them.

worker 0   right 7 of 8 --+
worker 1   right 5 of 7 --+--> right 12 of 15, as the metric reduces its states --> compute() on the
           first worker --> 0.8
worker 2   (a ghost)  --+        a worker whose metric has seen nothing is left out

torchmetrics is never imported here; a script with a metric has done that.
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
from paceline.state.snapshot import loads, pack

HOME: Final = "torchmetrics"
# what compute() looks at beside the state
_BESIDE: Final = ("_update_count", "_computed", "_to_sync")
_MOST: Final = 100  # numbers in one value


def is_metric(value: Any) -> bool:
    """Whether `value` is a metric, a collection of metrics, or a tracker of them."""
    home = sys.modules.get(HOME)
    return home is not None and isinstance(
        value, (home.Metric, home.MetricCollection, home.MetricTracker)
    )


def parts(metric: nn.Module) -> list[Any]:
    """Return the metrics that a metric is made of, itself among them, in the same order on all
    workers.
    """
    home = sys.modules[HOME]
    modules = list(metric.modules())
    for collection in (module for module in modules if isinstance(module, home.MetricCollection)):
        # those of a group share the state of one, which the others are given by this
        collection.values(copy_state=False)
    return [module for module in modules if isinstance(module, home.Metric)]


class HeldState:
    """The state of a worker's metric, as it is now, on its way to the host."""

    def __init__(self, metric: nn.Module) -> None:
        self._parts = [
            (part.update_count, {name: _held(state) for name, state in part.metric_state.items()})
            for part in parts(metric)
        ]

    def done(self) -> bool:
        """Whether `packed` would not wait."""
        held = (
            copy
            for _, states in self._parts
            for state in states.values()
            for copy in (state if isinstance(state, list) else [state])
        )
        return all(copy.done() for copy in held)

    def packed(self) -> bytes:
        """Return what the first worker needs of it."""
        return pack(
            [
                [count, {name: _read(state) for name, state in states.items()}]
                for count, states in self._parts
            ],
            copy=False,
        ).dumps()


def _held(state: Tensor | list[Tensor]) -> HostCopy | list[HostCopy]:
    return (
        HostCopy(state.detach())
        if isinstance(state, Tensor)
        else [HostCopy(each.detach()) for each in state]
    )


def _read(state: HostCopy | list[HostCopy]) -> Tensor | list[Tensor]:
    return [each.read() for each in state] if isinstance(state, list) else state.read()


class MetricValues:
    """The metrics that this worker has logged, by which it makes values of the states of all
    workers.
    """

    def __init__(self) -> None:
        self._metrics: dict[str, nn.Module] = {}

    def know(self, name: str, metric: nn.Module) -> None:
        """Take note of the metric that is logged under this name."""
        self._metrics[name] = metric

    def of(self, name: str, states: Sequence[bytes]) -> dict[str, float]:
        """Return the value of what workers have packed: one number, or one for each name or place
        in it; nothing if nobody has counted.

        Raises `UsageError` for a value of very many numbers, and if this worker hasn't logged it.
        """
        metric = self._metrics.get(name)
        if metric is None:
            raise UsageError(
                f"run.log({name}=...) was given a metric on other workers, and not on the first, "
                "which puts them together"
            )
        workers = [loads(state).unpack() for state in states]
        if not any(count for mine in workers for count, _ in mine):
            return {}
        with _put_together(parts(metric), workers):
            found = dict(_flat(name, metric.compute()))  # type: ignore[operator]
        if len(found) > _MOST:
            raise UsageError(
                f"run.log({name}=...) got a {type(metric).__qualname__}, whose value is "
                f"{len(found)} numbers; log those that matter, "
                "such as run.log(worst=metric.compute().min())"
            )
        return found


@contextmanager
def _put_together(metrics: Sequence[Any], workers: Sequence[Any]) -> Iterator[None]:
    """Let metrics of this worker have the states of all workers, inside of the block."""
    kept = [
        {**part.metric_state, **{name: getattr(part, name) for name in _BESIDE}} for part in metrics
    ]
    try:
        for at, part in enumerate(metrics):
            mine = [worker[at] for worker in workers]
            counted = [states for count, states in mine if count] or [mine[0][1]]
            states = {
                name: _reduced(reduction, [each[name] for each in counted])
                for name, reduction in part._reductions.items()
            }
            beside = dict(zip(_BESIDE, (sum(count for count, _ in mine), None, False), strict=True))
            _set(
                part, {name: _moved(state, part.device) for name, state in states.items()} | beside
            )
        yield
    finally:
        for part, before in zip(metrics, kept, strict=True):
            _set(part, before)


def _set(part: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(part, name, value)


def _reduced(reduction: Callable[[Any], Any] | None, states: Sequence[Any]) -> Any:
    """Return the state of several workers as torchmetrics makes it when it synchronises."""
    if len(states) == 1:
        return states[0]
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


def _moved(state: Any, device: torch.device) -> Any:
    return (
        [each.to(device) for each in state] if isinstance(state, list | tuple) else state.to(device)
    )


def _flat(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers in a value, each with a name of its own."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{name}/{key}", item)
    elif isinstance(value, Tensor) and value.numel() == 1:
        yield name, float(value.detach())
    elif isinstance(value, Tensor | list | tuple):
        for place, item in enumerate(value):
            yield from _flat(f"{name}/{place}", item)
    else:
        yield name, float(value)
