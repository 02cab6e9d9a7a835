"""Lets all workers that hold parts of a model skip a step if one part of the gradient overflows.

scaler.step(optimizer)     looks for inf and nan in this worker's part of the gradient
                           -> found on any worker: no worker steps
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.loop.turns import TrainingLoop
from paceline.prepare import hooks
from paceline.prepare.binding import rebind_method
from paceline.workers.axes import RunAxes


def bind_scaler(scaler: Any, loop: TrainingLoop, axes: RunAxes) -> None:
    """Let a GradScaler act with the optimizer, and look for overflows along the axes of cuts."""
    hooks.bind_scaler(scaler, loop)
    if not axes.cut_axes:
        return
    group = axes.groups.group_along(*axes.cut_axes)

    def looking(own: Callable[..., Any]) -> Callable[..., Any]:
        def look(self: Any, *args: Any, **options: Any) -> Any:
            overflows = own(self, *args, **options)
            for overflow in overflows.values():  # one for each device
                group.all_reduce(overflow, op="max", name="GradScaler", out=overflow).wait()
            return overflows

        return look

    # which all that a GradScaler does with gradients goes through
    rebind_method(scaler, "_unscale_grads_", looking, loop)
