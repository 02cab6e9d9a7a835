"""Optimizers over flat pieces: which ones need whole parameters, and how gradients are cleared.

torch's own clipping of pieces is refused if no run clips in its place: a worker has a part of each
gradient alone, and would clip by the norm of that part.
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

# Optimizers of any library that need a norm, a product or a step size over all parameters together,
# in lower case.
GLOBAL_OPTIMIZERS = (
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


def needs_global_number(optimizer: Optimizer) -> bool:
    """Whether an optimizer needs a number over all parameters, by the names of its base classes."""
    return not is_elementwise(optimizer) and any(
        kind.__name__.lower() in GLOBAL_OPTIMIZERS for kind in type(optimizer).__mro__
    )


class NormGuard:
    """Replaces a function of torch that clips by norm, and refuses parameters that are cut."""

    def __init__(self, before: Callable[..., Any]) -> None:
        self.before = before
        self.names = WeakIdKeyDictionary()  # names of cut parameters, by parameter

    def __call__(self, parameters: Any, *args: Any, **options: Any) -> Any:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for parameter in given:
            if parameter in self.names:
                raise UsageError(
                    f"torch's clip_grad_norm_ would clip {self.names[parameter]} by the norm of "
                    "this worker's part, as it is cut by "
                    "shard(); call run.clip(model, max_norm), which takes the norm over all workers"
                )
        return self.before(given, *args, **options)


def refuse_partial_norms(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """Let torch's clip_grad_norm_ raise for these parameters, wherever it was imported from."""
    # Private to torch: clip_grad_norm_ looks this function up in its module. If that changes, the
    # guard is never called, and clip_grad_norm_ clips pieces by the norm of this worker's part.
    guard = clip_grad._clip_grads_with_norm_
    if not isinstance(guard, NormGuard):
        guard = NormGuard(guard)
        setattr(clip_grad, "_clip_grads_with_norm_", guard)  # noqa: B010
    for name, parameter in parameters:
        guard.names[parameter] = name


class ValueGuard:
    """Replaces a function in torch's clipping by value, which would find no gradients to clip.

    With zero=1 and zero=2 pieces have the gradients, and whole parameters have none.
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
    """Let torch's clip_grad_value_ raise if it would do nothing, as long as `wholes` are alive."""
    # Private to torch, and found in its module, as above. Of its callers only clip_grad_value_
    # passes on empty lists.
    guard: Any = vars(clip_grad)["_group_tensors_by_device_and_dtype"]
    if not isinstance(guard, ValueGuard):
        guard = ValueGuard(guard)
        setattr(clip_grad, "_group_tensors_by_device_and_dtype", guard)  # noqa: B010
    for whole in wholes:
        guard.wholes[whole] = True


def hook_zero_grad(model: torch.nn.Module, pieces: dict[int, torch.nn.Parameter]) -> None:
    """Let `zero_grad` of a model and its modules clear the gradients of pieces, too.

    `pieces` are by the ids of their whole parameters. Copies of the model keep the plain
    `zero_grad`.
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


def is_clipping_refused(parameter: Tensor) -> bool:
    """Whether torch's clip_grad_norm_ is refused for a parameter, as it is cut already."""
    guard = clip_grad._clip_grads_with_norm_
    return isinstance(guard, NormGuard) and parameter in guard.names
