"""Optimizers of flat pieces: those that step each element by itself are right on pieces, and all others are refused.

Clipping by torch's own norm is refused for pieces too, as a worker has a part of each gradient alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from paceline.errors import UsageError

ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")


def check_elementwise(optimizer: Optimizer) -> None:
    """Raise `UsageError` for an optimizer that looks at whole parameters, or that isn't known to step each element by itself."""
    kinds = [kind.__name__ for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim")]
    if not kinds or kinds[0] not in ELEMENTWISE:
        raise UsageError(
            f"{type(optimizer).__qualname__} may look at whole parameters, and shard() gives each worker flat pieces of them; what goes is "
            f"what steps each element by itself: {', '.join(ELEMENTWISE)}, and classes made of these"
        )


class ClipGuard:
    """Stands before torch's own clipping by norm, which would take the norm of this worker's part for that of the gradient."""

    def __init__(self, before: Callable[..., Any]) -> None:
        self.before = before
        self.names = WeakIdKeyDictionary()  # of parameters that are cut

    def __call__(self, parameters: Any, *args: Any, **options: Any) -> Any:
        asked = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for parameter in asked:
            if parameter in self.names:
                raise UsageError(
                    f"torch's clip_grad_norm_ would clip {self.names[parameter]} by the norm of this worker's part, as it is cut by "
                    "shard(); call run.clip(model, max_norm), which takes the norm over all workers"
                )
        return self.before(asked, *args, **options)


def refuse_partial_norms(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """Have torch's clip_grad_norm_ raise for these parameters from now on, wherever a script has imported it from."""
    guard = clip_grad._clip_grads_with_norm_
    if not isinstance(guard, ClipGuard):
        guard = ClipGuard(guard)
        setattr(clip_grad, "_clip_grads_with_norm_", guard)  # noqa: B010  clip_grad_norm_ looks it up there
    for name, parameter in parameters:
        guard.names[parameter] = name


def is_refused(parameter: Tensor) -> bool:
    """Whether torch's clip_grad_norm_ is refused for a parameter, as it is cut already."""
    guard = clip_grad._clip_grads_with_norm_
    return isinstance(guard, ClipGuard) and parameter in guard.names
