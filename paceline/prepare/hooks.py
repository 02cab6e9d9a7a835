"""Binds a script's own objects to the training loop: models, optimizers, schedulers and scalers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from paceline.comm.agreement import Agreement
from paceline.errors import UsageError
from paceline.loop.forward_turn import NOTHING
from paceline.loop.turns import TrainingLoop
from paceline.prepare.binding import rebind
from paceline.prepare.checks import SCALED_AGAIN, SCALED_SERVED, check_scaler
from paceline.prepare.remote import RemoteSteps

SEEN = 2  # steps in which the caller of an optimizer is looked at


# ---- rebinding a user's own objects


class ForwardHook:
    """A forward hook that tells `loop` of each forward.

    In a copied or unpickled model it does nothing.
    """

    def __init__(self, loop: TrainingLoop | None = None) -> None:
        self._loop = loop

    def __call__(self, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if self._loop is not None:
            self._loop.forward(args, options)

    def follows(self, loop: TrainingLoop) -> bool:
        """Whether this hook tells `loop`."""
        return self._loop is loop

    def __deepcopy__(self, memo: object) -> ForwardHook:
        return ForwardHook()

    def __reduce__(self) -> tuple[Any, ...]:
        return NOTHING


def follow(model: nn.Module, loop: TrainingLoop) -> None:
    """Tell `loop` before each forward of a model, until the run ends.

    Calling it twice is harmless.
    """
    if not any(
        isinstance(hook, ForwardHook) and hook.follows(loop)
        for hook in model._forward_pre_hooks.values()
    ):
        hook = nn.Module.register_forward_pre_hook(
            model, ForwardHook(loop), with_kwargs=True
        )  # torch.jit hides the method, and calls hooks
        loop.bound.append(hook.remove)


class OptimizerBindings:
    """How prepared optimizers step.

    `groups` has, by the optimizer's id, how many parameter groups it had when last checked;
    `remote` has what steps it, if it steps elsewhere.
    """

    def __init__(self, begins: Callable[[Optimizer, bool], None]) -> None:
        self.groups: dict[int, int] = {}
        self.remote: dict[int, RemoteSteps] = {}
        # is told of a step that acts, and whether gradients are there, where an optimizer is not as
        # in `groups`
        self.begins = begins


def bind_optimizer(optimizer: Optimizer, loop: TrainingLoop, bindings: OptimizerBindings) -> None:
    """Let `step` wait for exchanged gradients."""
    groups, remote = bindings.groups, bindings.remote

    def stepping(own: Callable[..., Any]) -> Callable[..., Any]:
        def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._opt_called = True  # type: ignore[attr-defined]
            closure = kwargs.get("closure", args[0] if args else None)
            if not (loop.may_step() if closure is None else loop.acting):
                return None if closure is None else _called(closure)
            if groups.get(id(self)) != len(self.param_groups):
                bindings.begins(self, closure is None)
            transaction = loop.backward.transaction
            if (transaction.recovers or id(self) in remote) and loop.steps < SEEN:
                check_scaler(loop.scalers, SCALED_SERVED if id(self) in remote else SCALED_AGAIN)
            if id(self) in remote:
                return remote[id(self)].step(self, own, closure, args, kwargs)
            if transaction.recovers:
                transaction.stepping(remote=False)
            result = own(self, *args, **kwargs)
            loop.stepped(self)
            return result

        return step

    rebind(optimizer, "step", stepping, loop)


def bind_groups(optimizer: Optimizer, loop: TrainingLoop, trained: Callable[[Any], Any]) -> None:
    """Let an optimizer that gets parameters later (add_param_group) step the `trained` tensors."""

    def adding(own: Callable[..., Any]) -> Callable[..., Any]:
        def add_param_group(self: Optimizer, group: Any, *args: Any) -> Any:
            given = group["params"]
            if not isinstance(given, set):  # which torch refuses
                given = [given] if isinstance(given, torch.Tensor) else given
                group["params"] = [
                    (p[0], trained(p[1])) if isinstance(p, tuple) else trained(p) for p in given
                ]
            return own(self, group, *args)

        return add_param_group

    rebind(optimizer, "add_param_group", adding, loop)


def _called(closure: Callable[[], Any]) -> Any:
    with torch.enable_grad():
        return closure()


def bind_scheduler(scheduler: Any, loop: TrainingLoop) -> None:
    """Let `step` of a scheduler act when the optimizer's does.

    A metric that it judges by must be the same on all workers.

    Out of lockstep fast workers have more turns than an epoch has batches: a schedule that has
    reached its end stays there.
    """

    def stepping(own: Callable[..., Any]) -> Callable[..., Any]:
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not loop.acting:
                return None
            if isinstance(self, ReduceLROnPlateau):
                _same_metric(
                    loop.context.agreement,
                    float(kwargs["metrics"] if "metrics" in kwargs else args[0]),
                )
            if (
                loop.apart
                and isinstance(self, OneCycleLR)
                and self.last_epoch >= self.total_steps - 1
            ):
                return None
            return own(self, *args, **kwargs)

        return step

    def stating(own: Callable[..., Any]) -> Callable[..., Any]:
        def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
            # all that the object has, the methods set here included
            state = own(self, *args, **kwargs)
            return {key: value for key, value in state.items() if key not in ("step", "state_dict")}

        return state_dict

    rebind(scheduler, "step", stepping, loop)
    rebind(scheduler, "state_dict", stating, loop)


def _same_metric(agreement: Agreement, metric: float) -> None:
    found = [
        msgpack.unpackb(answer)
        for answer in agreement.meet("scheduler.step", msgpack.packb(metric))
    ]
    if len(set(map(repr, found))) > 1:
        sides = ", ".join(f"{value:g} on rank {rank}" for rank, value in enumerate(found))
        raise UsageError(
            f"scheduler.step got different metrics ({sides}), and learning rates would part; "
            "give it run.mean(metric)"
        )


def bind_scaler(scaler: Any, loop: TrainingLoop) -> None:
    """Let a GradScaler act when the optimizer does, on exchanged gradients."""
    loop.scalers.append(scaler)
    for name in ("unscale_", "step", "update"):

        def acting(own: Callable[..., Any], name: str = name) -> Callable[..., Any]:
            def act(self: Any, *args: Any, **kwargs: Any) -> Any:
                if name != "update":
                    loop.ready(f"scaler.{name}")
                return own(self, *args, **kwargs) if loop.acting else None

            return act

        rebind(scaler, name, acting, loop)
