"""Metrics of torchmetrics that take part in a run: they count nothing in a ghost turn.

torchmetrics is never imported here; a script with a metric has done that.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from paceline.errors import UsageError
from paceline.session.loop.turns import TrainingLoop
from paceline.session.prepare.binding import rebind

HOME = "torchmetrics"


def is_metric(value: Any) -> bool:
    """Whether `value` is a metric, a collection of metrics, or a tracker of them."""
    home = sys.modules.get(HOME)
    return home is not None and isinstance(value, (home.Metric, home.MetricCollection, home.MetricTracker))


def within(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the metrics in a model; a collection counts as one."""
    if is_metric(module):
        yield module
    else:
        for child in module.children() if HOME in sys.modules else ():
            yield from within(child)


def bind(metric: nn.Module, loop: TrainingLoop) -> None:
    """Let `update` and `forward` count nothing in a ghost turn. `forward` still returns a value, of the ghost alone.

    Raises `UsageError` for a metric that exchanges in each step, where a ghost would count on the other workers.
    """
    if any(getattr(part, "dist_sync_on_step", False) for part in metric.modules()):
        raise UsageError(
            f"the {type(metric).__qualname__} has dist_sync_on_step=True, and would count the samples of ghosts in each step; leave that "
            "out: compute() brings all workers together"
        )

    def updating(own: Callable[..., Any]) -> Callable[..., Any]:
        def update(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return None if _ghost(loop) else own(self, *args, **kwargs)

        return update

    def running(own: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return type(self).forward(_fresh(self), *args, **kwargs) if _ghost(loop) else own(self, *args, **kwargs)

        return forward

    rebind(metric, "update", updating, loop)
    rebind(metric, "forward", running, loop)


def _fresh(metric: nn.Module) -> nn.Module:
    """Return a copy of a metric that isn't bound."""
    found = copy.deepcopy(metric)
    for name in ("update", "forward"):
        if getattr(found.__dict__.get(name), "__self__", None) is found:
            delattr(found, name)
    return found


def _ghost(loop: TrainingLoop) -> bool:
    turn = loop.turn
    return turn is not None and turn.ghost
