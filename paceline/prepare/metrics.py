"""Binds metrics of torchmetrics to a run, so that they count no samples of ghost turns.

torchmetrics is never imported here. A script that has a metric has imported it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from paceline.errors import UsageError
from paceline.loop.turns import TrainingLoop
from paceline.prepare.binding import rebind_method
from paceline.record.logged.metric import TORCHMETRICS, is_metric


def check_logged(values: Mapping[str, Any], prepared: Iterable[nn.Module]) -> None:
    """Raise `UsageError` for a logged metric that isn't prepared, or that can't be logged."""
    for name, metric in values.items():
        if not is_metric(metric):
            continue
        if isinstance(metric, sys.modules[TORCHMETRICS].MetricTracker):
            raise UsageError(
                f"run.log({name}=...) got a {type(metric).__qualname__}; "
                "log the metric that it holds now: tracker[-1]"
            )
        if not any(part is metric for other in prepared for part in other.modules()):
            raise UsageError(
                f"run.log({name}=...) got a {type(metric).__qualname__} that was not given to "
                "run.prepare, so it counts the samples of ghosts; prepare it, too: "
                "metric = run.prepare(metric)"
            )


def find_metrics(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the metrics in a model; a collection counts as one."""
    if is_metric(module):
        yield module
    else:
        for child in module.children() if TORCHMETRICS in sys.modules else ():
            yield from find_metrics(child)


def bind_metric(metric: nn.Module, loop: TrainingLoop) -> None:
    """Let `update` and `forward` count nothing in a ghost turn.

    `forward` still returns the value of the ghost's samples.

    Raises `UsageError` for a metric that exchanges in each step, as other workers would count the
    ghost's samples.
    """
    if any(getattr(part, "dist_sync_on_step", False) for part in metric.modules()):
        raise UsageError(
            f"the {type(metric).__qualname__} has dist_sync_on_step=True, and would count the "
            "samples of ghosts in each step; leave dist_sync_on_step out: compute() brings all "
            "workers together"
        )

    # In a ghost turn `update` does nothing, as its samples count on another worker.
    def updating(own: Callable[..., Any]) -> Callable[..., Any]:
        def update(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return None if _is_ghost_turn(loop) else own(self, *args, **kwargs)

        return update

    def running(own: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # A ghost turn runs on a copy, whose counts are dropped. The copy must not be bound: its
            # `forward` would come back here.
            return (
                type(self).forward(_copy_unbound(self), *args, **kwargs)
                if _is_ghost_turn(loop)
                else own(self, *args, **kwargs)
            )

        return forward

    rebind_method(metric, "update", updating, loop)
    rebind_method(metric, "forward", running, loop)


def _copy_unbound(metric: nn.Module) -> nn.Module:
    """Copy a metric, without the methods that bind it to a run."""
    unbound = copy.deepcopy(metric)
    for name in ("update", "forward"):
        if getattr(unbound.__dict__.get(name), "__self__", None) is unbound:
            delattr(unbound, name)
    return unbound


def _is_ghost_turn(loop: TrainingLoop) -> bool:
    turn = loop.turn
    return turn is not None and turn.ghost
