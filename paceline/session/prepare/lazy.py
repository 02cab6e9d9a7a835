"""Waits for parameters that may still be on their way (`ParameterServer(pull="forward")`), where torch doesn't ask for them itself.

A parameter on its way waits for itself in whatever torch does with it in Python's sight. Two things are out of it: C++ code of the user's
that a module hands its parameters to, and the transformations of torch.func, which wrap them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paceline.session.loop.forward_turn import NOTHING
from paceline.session.loop.turns import TrainingLoop
from paceline.sync.abilities import PendingParameters


class LazyHook:
    """A forward hook that waits for parameters: those of a module of the user's own class (`own`), or all where a model is transformed.

    In a copied or unpickled module it does nothing.
    """

    def __init__(self, arriving: PendingParameters | None = None, *, own: bool = False) -> None:
        self.arriving, self.own = arriving, own

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if self.arriving is None:
            return
        if self.own:
            self.arriving.use(list(module._parameters.values()))
        elif torch._C._are_functorch_transforms_active():
            self.arriving.use()

    def __deepcopy__(self, memo: object) -> LazyHook:
        return LazyHook()

    def __reduce__(self) -> tuple[Any, ...]:
        return NOTHING


def announce(models: list[nn.Module], arriving: PendingParameters, loop: TrainingLoop) -> None:
    """Hook these models until the run ends. Calling it twice is harmless."""
    for model in models:
        _hook(model, LazyHook(arriving), loop)
        for module in model.modules():
            foreign = not type(module).__module__.startswith("torch.nn.")
            if module._parameters and foreign and not isinstance(module, torch.jit.ScriptModule):
                _hook(module, LazyHook(arriving, own=True), loop)
    if not any(undo == arriving.end for undo in loop.bound):
        loop.bound.append(arriving.end)


def _hook(module: nn.Module, user: LazyHook, loop: TrainingLoop) -> None:
    known = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, LazyHook)]
    if not any(hook.arriving is user.arriving and hook.own is user.own for hook in known):
        loop.bound.append(module.register_forward_pre_hook(user).remove)
