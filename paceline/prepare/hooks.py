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
from paceline.loop.forward_turn import UNPICKLED_AS_NONE
from paceline.loop.step import CHECKED_STEPS, RemoteStepper, TrainingStep
from paceline.loop.turns import TrainingLoop
from paceline.prepare.binding import rebind_method
from paceline.prepare.checks import SCALED_AGAIN, SCALED_SERVED, check_scaler

# ---- rebinding a user's own objects


class ForwardHook:
    """A forward hook that tells `loop` before each forward.

    In a copied or unpickled model it does nothing.
    """

    def __init__(self, loop: TrainingLoop | None = None) -> None:
        self._loop = loop

    def __call__(self, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if self._loop is not None:
            self._loop.prepare_forward(args, options)

    def belongs_to(self, loop: TrainingLoop) -> bool:
        """Whether this hook tells `loop`."""
        return self._loop is loop

    def __deepcopy__(self, memo: object) -> ForwardHook:
        return ForwardHook()

    def __reduce__(self) -> tuple[Any, ...]:
        return UNPICKLED_AS_NONE


def follow_forwards(model: nn.Module, loop: TrainingLoop) -> None:
    """Tell `loop` before each forward of a model, until the run ends.

    A second call does nothing.
    """
    # `_forward_pre_hooks` is private to torch's nn.Module, a dict of hooks by id. If it goes, this
    # raises an AttributeError.
    if not any(
        isinstance(hook, ForwardHook) and hook.belongs_to(loop)
        for hook in model._forward_pre_hooks.values()
    ):
        # Modules of torch.jit hide the method, but they do call hooks.
        hook = nn.Module.register_forward_pre_hook(model, ForwardHook(loop), with_kwargs=True)
        loop.undos.append(hook.remove)


class OptimizerBindings:
    """How prepared optimizers step: the `PreparedOptimizers` of `loop/step.py`.

    Attributes:
        groups: Number of parameter groups of each optimizer when it was last checked, by id.
        remote: The stepper of each optimizer that steps elsewhere, by id.

    Args:
        begins: Checks an optimizer that is about to step, if its number of groups isn't the one in
            `groups`. It is told whether the optimizer has gradients.
        loop: The training loop.
    """

    def __init__(self, begins: Callable[[Optimizer, bool], None], loop: TrainingLoop) -> None:
        self.groups: dict[int, int] = {}
        self.remote: dict[int, RemoteStepper] = {}
        self._begins, self._loop = begins, loop

    def check(self, optimizer: Optimizer, *, has_gradients: bool) -> None:
        """Check an optimizer that steps for the first time, or has more parameters now.

        The first steps are also checked for a GradScaler that was not prepared, if it would skip
        steps on one worker alone.
        """
        if self.groups.get(id(optimizer)) != len(optimizer.param_groups):
            self._begins(optimizer, has_gradients)
        remote = id(optimizer) in self.remote
        if self._loop.steps_made < CHECKED_STEPS and (remote or self._loop.transaction.recovers):
            check_scaler(self._loop.scalers, SCALED_SERVED if remote else SCALED_AGAIN)


def bind_optimizer(
    optimizer: Optimizer, training_step: TrainingStep, bindings: OptimizerBindings
) -> None:
    """Let `optimizer.step` go through the training step, which waits for exchanged gradients."""

    def stepping(own_step: Callable[..., Any]) -> Callable[..., Any]:
        def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
            # torch's schedulers warn at their first step if the optimizer hasn't set this private
            # attribute. If torch renames it, they warn for no reason.
            self._opt_called = True  # type: ignore[attr-defined]
            return training_step.step_optimizer(self, own_step, bindings, args, kwargs)

        return step

    rebind_method(optimizer, "step", stepping, training_step.loop)


def bind_groups(optimizer: Optimizer, loop: TrainingLoop, trained: Callable[[Any], Any]) -> None:
    """Let an optimizer that gets parameters later (add_param_group) step the `trained` tensors."""

    def adding(own: Callable[..., Any]) -> Callable[..., Any]:
        def add_param_group(self: Optimizer, group: Any, *args: Any) -> Any:
            parameters = group["params"]
            # torch refuses a set, and says why. Else it takes one tensor, a list of tensors, or a
            # list of (name, tensor).
            if not isinstance(parameters, set):
                if isinstance(parameters, torch.Tensor):
                    parameters = [parameters]
                group["params"] = [
                    (p[0], trained(p[1])) if isinstance(p, tuple) else trained(p)
                    for p in parameters
                ]
            return own(self, group, *args)

        return add_param_group

    rebind_method(optimizer, "add_param_group", adding, loop)


def bind_scheduler(scheduler: Any, loop: TrainingLoop) -> None:
    """Let `step` of a scheduler act if the optimizer's acts.

    If the scheduler uses a metric, it must be the same on all workers.

    Out of lockstep a fast worker has more turns than its share of an epoch. So a schedule that has
    reached its end stays there.
    """

    def stepping(own: Callable[..., Any]) -> Callable[..., Any]:
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not loop.is_acting:
                return None
            if isinstance(self, ReduceLROnPlateau):
                _check_same_metric(
                    loop.context.agreement,
                    float(kwargs["metrics"] if "metrics" in kwargs else args[0]),
                )
            # OneCycleLR raises an error if it steps beyond its end.
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
            # torch returns all attributes of the object. The two methods that are set here are
            # among them, and must not get into checkpoints.
            state = own(self, *args, **kwargs)
            return {key: value for key, value in state.items() if key not in ("step", "state_dict")}

        return state_dict

    rebind_method(scheduler, "step", stepping, loop)
    rebind_method(scheduler, "state_dict", stating, loop)


def _check_same_metric(agreement: Agreement, metric: float) -> None:
    metrics = [
        msgpack.unpackb(answer)
        for answer in agreement.meet("scheduler.step", msgpack.packb(metric))
    ]
    if len(set(map(repr, metrics))) > 1:
        sides = ", ".join(f"{value:g} on rank {rank}" for rank, value in enumerate(metrics))
        raise UsageError(
            f"scheduler.step got different metrics ({sides}), so learning rates would differ; "
            "give it run.mean(metric)"
        )


def bind_scaler(scaler: Any, loop: TrainingLoop) -> None:
    """Let a GradScaler act if the optimizer acts, on exchanged gradients."""
    loop.scalers.append(scaler)
    for name in ("unscale_", "step", "update"):
        # `update` uses the overflow flags of the other two methods, and no gradients.
        def acting(own: Callable[..., Any], name: str = name) -> Callable[..., Any]:
            def act(self: Any, *args: Any, **kwargs: Any) -> Any:
                if name != "update":
                    loop.exchange_due_gradients(f"scaler.{name}")
                return own(self, *args, **kwargs) if loop.is_acting else None

            return act

        rebind_method(scaler, name, acting, loop)
