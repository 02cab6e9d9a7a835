"""Lets all workers that hold parts of a model skip the step of an optimizer, where the gradient
overflows in the part of one of them.

scaler.step(optimizer)     looks for inf and nan in my part of the gradient     ->  found on any
                           worker: nobody steps
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.loop.turns import TrainingLoop
from paceline.prepare import hooks
from paceline.prepare.binding import rebind
from paceline.workers.axes import RunAxes


def bind_scaler(scaler: Any, loop: TrainingLoop, axes: RunAxes) -> None:
    """Let a GradScaler act when the optimizer does, and look for overflows on all workers along
    the axes that models are cut along.
    """
    hooks.bind_scaler(scaler, loop)
    if not axes.cut:
        return
    group = axes.groups.group_along(*axes.cut)

    def looking(own: Callable[..., Any]) -> Callable[..., Any]:
        def look(self: Any, *args: Any, **options: Any) -> Any:
            found = own(self, *args, **options)
            for overflow in found.values():  # one for each device
                group.all_reduce(overflow, op="max", name="GradScaler", out=overflow).wait()
            return found

        return look

    # which all that a GradScaler does with gradients goes through
    rebind(scaler, "_unscale_grads_", looking, loop)
