"""A Keras optimizer as an optimizer of torch, which paceline can prepare, save and resume.

model.fit         loss.backward()     paceline exchanges gradients: p.grad is the mean
                  optimizer.apply     `_SteppedInTurn.apply`
                    `KerasSteps.step`   paceline: may it step? (loop/step.py)
                      Keras's apply     clipping, accumulation, averages of weights, the step
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import keras
import torch
from torch.optim import Optimizer

from paceline.errors import UsageError

T = TypeVar("T")


def check_keras() -> None:
    """Raise `UsageError` if Keras doesn't run on torch."""
    if (backend := keras.backend.backend()) != "torch":
        raise UsageError(
            f"Keras runs on {backend} here, and paceline.bridges.keras needs torch: set the "
            "environment variable KERAS_BACKEND=torch before Keras is imported (for TensorFlow "
            "there is paceline.bridges.horovod.tensorflow)"
        )


class KerasSteps(Optimizer):
    """Steps a Keras optimizer in the place of an optimizer of torch.

    Its state are the variables of the Keras optimizer: its count of steps, its learning rate, its
    moments. They are the same memory, so each side sees the changes of the other.

    Args:
        optimizer: The Keras optimizer.
        variables: The trainable variables of the model, in the model's order.
    """

    def __init__(self, optimizer: Any, variables: list[Any]) -> None:
        super().__init__([variable.value for variable in variables], {})
        if not optimizer.built:
            optimizer.build(variables)
        self._pending: Callable[[], None] | None = None
        # torch saves what is in `state`, by the place of a parameter.
        self.state[variables[0].value] = {
            f"{place}.{variable.name}": variable.value
            for place, variable in enumerate(optimizer.variables)
        }

    def apply(self, own_apply: Callable[[], None]) -> None:
        """Step by `own_apply`, unless the turn isn't to be stepped."""
        self._pending = own_apply
        try:
            self.step()
        finally:
            self._pending = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Run the method `apply` of the Keras optimizer."""
        if self._pending is None or closure is not None:
            raise UsageError("a Keras optimizer steps by its own method `apply`, not by `step`")
        self._pending()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy saved values into the variables of the Keras optimizer."""
        (own,), (saved,) = self.state.values(), state_dict["state"].values()
        if own.keys() != saved.keys():
            raise ValueError(
                f"the saved optimizer has the variables {', '.join(saved)}, and this one has "
                f"{', '.join(own)}"
            )
        for name, value in own.items():
            value.copy_(saved[name])


class _SteppedInTurn:
    """What `DistributedOptimizer` puts before the class of a Keras optimizer."""

    _paceline_steps: KerasSteps | None

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Step with gradients that are means over all workers."""
        if self._paceline_steps is None:
            raise UsageError(
                "this DistributedOptimizer steps before its model was prepared, so nothing would "
                "be exchanged: call paceline.bridges.keras.prepare(run, model, loader) after "
                "model.compile"
            )
        own_apply: Callable[..., None] = super().apply  # type: ignore[misc]
        self._paceline_steps.apply(lambda: own_apply(grads, trainable_variables))


def DistributedOptimizer(optimizer: T | str) -> T:
    """Let a Keras optimizer step with the mean gradients of all workers.

    >>> model.compile(optimizer=DistributedOptimizer(keras.optimizers.Adam(1e-3)), loss="mse")

    The gradients are exchanged during `loss.backward()`, once `prepare` has the model. Without
    `prepare` the first step raises an error. A model that is saved by Keras has the plain
    optimizer.

    Args:
        optimizer: An optimizer of Keras, or its name.

    Returns:
        The same object. Its class has another `apply`, and the same name.

    Raises:
        UsageError: Keras doesn't run on torch, or this is no optimizer of Keras.
    """
    check_keras()
    own: Any = keras.optimizers.get(optimizer) if isinstance(optimizer, str) else optimizer
    if not isinstance(own, keras.optimizers.Optimizer):
        raise UsageError(
            f"DistributedOptimizer got a {type(own).__module__}.{type(own).__qualname__}; "
            "give it an optimizer of keras.optimizers"
        )
    if isinstance(own, keras.optimizers.LossScaleOptimizer):
        raise UsageError(
            "DistributedOptimizer got a LossScaleOptimizer, which scales the loss by itself: use "
            "the policy mixed_bfloat16, which needs no scale"
        )
    if not isinstance(own, _SteppedInTurn):
        # Keras writes the module and the name of the class into its files, so both stay.
        kind = type(own)
        body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        object.__setattr__(own, "__class__", type(kind.__name__, (_SteppedInTurn, kind), body))
        object.__setattr__(own, "_paceline_steps", None)
    return own  # type: ignore[no-any-return]


def make_steps(model: Any) -> KerasSteps:
    """Connect the optimizer of a compiled model with one of torch.

    Raises `UsageError` if the model wasn't compiled with a `DistributedOptimizer`.
    """
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, _SteppedInTurn):
        raise UsageError(
            f"the model was compiled with {type(optimizer).__name__}: write "
            "model.compile(optimizer=DistributedOptimizer(...), ...) before prepare"
        )
    if optimizer._paceline_steps is None:
        steps = KerasSteps(optimizer, model.trainable_variables)
        object.__setattr__(optimizer, "_paceline_steps", steps)
    assert optimizer._paceline_steps is not None
    return optimizer._paceline_steps
