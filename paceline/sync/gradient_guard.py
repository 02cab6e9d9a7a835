"""Guards p.grad before a backward pass adds to it, for parameters that may hold something there.

scripts that zero to None     no p.grad holds anything when a pass begins: no hook before the nodes
                              of parameters
accumulation, zeroed p.grad   a hook before the node of each parameter that held something once, for
                              good
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from torch import Tensor
from torch.nn import Parameter

from paceline.errors import UsageError
from paceline.sync.autograd_engine import AnnouncingEngine, leave, listen

GRAPHLESS: Final = (
    "an exchanged gradient has no graph; use torch.autograd.grad(..., create_graph=True) for the "
    "penalty, it stays local"
)


class GuardedParameter(Protocol):
    """A guarded parameter: the node that adds to its gradient, hooks there, and the part set
    aside.
    """

    parameter: Parameter
    node: Any
    handles: list[Any]
    unsent: Tensor | None


Guarded = TypeVar("Guarded", bound=GuardedParameter)


class GradientGuard(Generic[Guarded]):
    """Calls `set_apart` with a guarded parameter that has a p.grad, before a pass adds to it.

    As a `PassListener` it sees the beginning of passes, and guards a parameter from the first pass
    that finds its p.grad taken. Hooks on all parameters would do, too, but would take longer than
    all the other work for a small gradient.
    """

    def __init__(self, set_apart: Callable[[Guarded], None]) -> None:
        self._set_apart = set_apart
        self._engine: AnnouncingEngine | None = None  # which announces passes
        self._unguarded: list[Guarded] = []

    def listen(self) -> None:
        """Follow passes from now on. Calling it twice is harmless."""
        self._engine = listen(self)

    def leave(self) -> None:
        """Follow passes no longer. Hooks belong to the parameters, and stay."""
        leave(self)
        self._unguarded.clear()

    def add(self, hook: Guarded) -> None:
        """Take in a parameter that is watched from now on."""
        self._unguarded.append(hook)
        if hook.parameter.grad is not None:
            self._guard([hook])

    def pass_begins(self) -> None:
        """Guard the parameters whose p.grad holds something, or may do so later in this pass."""
        self._guard(
            [
                hook
                for hook in self._unguarded
                if hook.parameter.grad is not None or hook.unsent is not None
            ]
        )

    def pass_elsewhere(self) -> None:
        """Guard all parameters: their p.grad can't be looked at in this thread."""
        self._guard(self._unguarded)

    @property
    def announced(self) -> bool:
        """Whether the pass under way was announced, or all parameters are guarded anyway."""
        return not self._unguarded or self._engine is None or bool(self._engine.running)

    def follow_unannounced(self, *, first: bool) -> None:
        """Guard all parameters from now on, as a pass began in C++ code.

        Raises where others went before: what p.grad held isn't known.
        """
        if not first:
            raise UsageError(
                "a backward pass began inside of TorchScript or C++ code, and others before it in "
                "Python: what p.grad held before it can't "
                "be told; call loss.backward() in Python"
            )
        self._guard(self._unguarded)

    def _guard(self, hooks: Sequence[Guarded]) -> None:
        for hook in hooks:
            hook.handles.append(hook.node.register_prehook(functools.partial(self._before, hook)))
        if hooks:
            self._unguarded = [hook for hook in self._unguarded if len(hook.handles) == 1]

    def _before(self, hook: Guarded, _: Any) -> None:
        if hook.parameter.grad is not None or hook.unsent is not None:
            self._set_apart(hook)


def explain_changed(
    name: str, parameter: Parameter, mean: Tensor, error: RuntimeError
) -> Exception:
    """Error that explains why p.grad can't be the mean: the parameter changed after `prepare`."""
    if (parameter.dtype, parameter.device, parameter.shape) == (
        mean.dtype,
        mean.device,
        mean.shape,
    ):
        return error
    return UsageError(
        f"the parameter {name} was {list(mean.shape)} {mean.dtype} on {mean.device} in "
        f"run.prepare, and is {list(parameter.shape)} "
        f"{parameter.dtype} on {parameter.device} now: call model.to(...), .double(), .half() and "
        "the like before run.prepare"
    )
