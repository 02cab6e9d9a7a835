"""Lets all workers with parts of a model skip a step if one part of the gradient overflows.

scaler.step(optimizer)     looks for inf and nan in this worker's part of the gradient
                           -> inf or nan on any worker: no worker steps
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.loop.turns import TrainingLoop
from paceline.prepare import hooks
from paceline.prepare.binding import rebind_method
from paceline.workers.axes import RunAxes


def bind_scaler(scaler: Any, loop: TrainingLoop, axes: RunAxes) -> None:
    """Bind a GradScaler to the loop, and combine its overflow flags along the axes of cuts."""
    hooks.bind_scaler(scaler, loop)
    if not axes.cut_axes:
        return
    group = axes.groups.group_along(*axes.cut_axes)

    def combine_flags(own: Callable[..., Any]) -> Callable[..., Any]:
        def unscale_gradients(self: Any, *args: Any, **options: Any) -> Any:
            overflows = own(self, *args, **options)
            # One flag for each device.
            for overflow in overflows.values():
                group.all_reduce(overflow, op="max", name="GradScaler", out=overflow).wait()
            return overflows

        return unscale_gradients

    # Private: breaks if `unscale_` and `step` no longer look for overflows by this method.
    rebind_method(scaler, "_unscale_grads_", combine_flags, loop)
