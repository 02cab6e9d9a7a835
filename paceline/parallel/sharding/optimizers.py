"""Optimizers and flat pieces: which take one number over all parameters, and what clips and clears
gradients that pieces have.

Clipping by torch's own norm is refused for pieces where no run clips in its place, as a worker has
a part of each gradient alone.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from paceline.errors import UsageError
from paceline.parallel.elementwise import is_elementwise

# in lower case: optimizers of any library that take a norm, a product or a step size over all
# parameters together
ONE_NUMBER = (
    *(
        "adai",
        "adaiv2",
        "alig",
        "asam",
        "bsam",
        "dadaptadagrad",
        "dadaptadam",
        "dadaptadan",
        "dadaptlion",
        "dadaptsgd",
        "dog",
        "dowg",
    ),
    *(
        "friendlysam",
        "gsam",
        "looksam",
        "momo",
        "momoadam",
        "prodigy",
        "prodigyreference",
        "ranger21",
        "sam",
        "wsam",
    ),
)


def takes_one_number(optimizer: Optimizer) -> bool:
    """Whether an optimizer takes one number over all parameters, by the names of its class and
    of those that it is made of.
    """
    return not is_elementwise(optimizer) and any(
        kind.__name__.lower() in ONE_NUMBER for kind in type(optimizer).__mro__
    )


class ClipGuard:
    """Stands before torch's own clipping by norm, which would take the norm of this worker's
    part for that of the gradient.
    """

    def __init__(self, before: Callable[..., Any]) -> None:
        self.before = before
        self.names = WeakIdKeyDictionary()  # of parameters that are cut

    def __call__(self, parameters: Any, *args: Any, **options: Any) -> Any:
        asked = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for parameter in asked:
            if parameter in self.names:
                raise UsageError(
                    f"torch's clip_grad_norm_ would clip {self.names[parameter]} by the norm of "
                    "this worker's part, as it is cut by "
                    "shard(); call run.clip(model, max_norm), which takes the norm over all workers"
                )
        return self.before(asked, *args, **options)


def refuse_partial_norms(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """Have torch's clip_grad_norm_ raise for these parameters from now on, wherever a script has
    imported it from.
    """
    guard = clip_grad._clip_grads_with_norm_
    if not isinstance(guard, ClipGuard):
        guard = ClipGuard(guard)
        # clip_grad_norm_ looks it up there
        setattr(clip_grad, "_clip_grads_with_norm_", guard)  # noqa: B010
    for name, parameter in parameters:
        guard.names[parameter] = name


class ValueGuard:
    """Stands before torch's own clipping by value, which finds no gradients at whole parameters
    whose pieces have them.
    """

    def __init__(self, before: Callable[..., Any]) -> None:
        self.before = before
        self.wholes = WeakIdKeyDictionary()

    def __call__(self, lists: Any, *args: Any, **options: Any) -> Any:
        if self.wholes and not any(lists):
            raise UsageError(
                "torch's clip_grad_value_ was given parameters without gradients, and a model is "
                "cut by shard(zero=1) or (zero=2), where "
                "pieces have them: give it what the optimizer steps, [p for group in "
                "optimizer.param_groups for p in group['params']]"
            )
        return self.before(lists, *args, **options)


def refuse_idle_clipping(wholes: Iterable[torch.nn.Parameter]) -> None:
    """Have torch's clip_grad_value_ raise where it would do nothing, as long as these parameters
    live.
    """
    # clip_grad_value_ alone gives it empty lists
    guard: Any = vars(clip_grad)["_group_tensors_by_device_and_dtype"]
    if not isinstance(guard, ValueGuard):
        guard = ValueGuard(guard)
        setattr(clip_grad, "_group_tensors_by_device_and_dtype", guard)  # noqa: B010
    for whole in wholes:
        guard.wholes[whole] = True


def clear_pieces_too(model: torch.nn.Module, pieces: dict[int, torch.nn.Parameter]) -> None:
    """Let `zero_grad` of a model and its modules clear the gradients of pieces, by the ids of
    their whole parameters; copies stay plain.
    """

    def zero_grad(self: torch.nn.Module, set_to_none: bool = True) -> None:
        type(self).zero_grad(self, set_to_none)
        for parameter in self.parameters():
            piece = pieces.get(id(parameter))
            if piece is not None and set_to_none:
                piece.grad = None
            elif piece is not None and piece.grad is not None:
                piece.grad = torch.zeros_like(piece.grad)

    for module in model.modules():
        setattr(module, "zero_grad", types.MethodType(zero_grad, module))  # noqa: B010


def is_refused(parameter: Tensor) -> bool:
    """Whether torch's clip_grad_norm_ is refused for a parameter, as it is cut already."""
    guard = clip_grad._clip_grads_with_norm_
    return isinstance(guard, ClipGuard) and parameter in guard.names
