"""Guards a p.grad that holds a gradient before a backward pass adds to it.

a script sets p.grad to None      no p.grad holds a gradient when a pass begins, so parameters
before each pass                  get no hook
a script accumulates gradients    a parameter gets a hook in front of its AccumulateGrad node
or zeroes them in place           the first time its p.grad isn't None, and keeps it
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from torch import Tensor
from torch.nn import Parameter

from paceline.errors import UsageError
from paceline.sync.autograd_engine import AnnouncingEngine, add_pass_listener, remove_pass_listener

NO_GRAPH: Final = (
    "an exchanged gradient has no graph; use torch.autograd.grad(..., create_graph=True) for the "
    "penalty, it stays local"
)


class GuardedParameter(Protocol):
    """A parameter that can be guarded."""

    parameter: Parameter
    node: Any  # its AccumulateGrad node, which adds to p.grad
    handles: list[Any]  # handles of its hooks; a second one is the guard
    unsent: Tensor | None  # sum of earlier passes that is not exchanged yet


Guarded = TypeVar("Guarded", bound=GuardedParameter)


class GradientGuard(Generic[Guarded]):
    """Calls `set_apart` with each parameter that has a p.grad, before a pass adds to it.

    As a `PassListener` it is told when passes begin. A parameter is guarded from the first pass
    that finds a gradient in its p.grad. Hooks on all parameters would work too, but for a small
    gradient they take longer than all other work.
    """

    def __init__(self, set_apart: Callable[[Guarded], None]) -> None:
        self._set_apart = set_apart
        self._engine: AnnouncingEngine | None = None  # announces passes
        self._unguarded: list[Guarded] = []

    def start_listening(self) -> None:
        """Follow passes from now on. Calling this twice is harmless."""
        self._engine = add_pass_listener(self)

    def stop_listening(self) -> None:
        """Stop following passes. Hooks stay: `GradientTracker` removes them."""
        remove_pass_listener(self)
        self._unguarded.clear()

    def watch_parameter(self, hook: Guarded) -> None:
        """Watch a parameter from now on."""
        self._unguarded.append(hook)
        if hook.parameter.grad is not None:
            self._add_guards([hook])

    def handle_pass(self) -> None:
        """Guard the parameters that hold a gradient, or may hold one later in this pass."""
        self._add_guards(
            [
                hook
                for hook in self._unguarded
                if hook.parameter.grad is not None or hook.unsent is not None
            ]
        )

    def handle_pass_elsewhere(self) -> None:
        """Guard all parameters, as another thread may be adding to their gradients."""
        self._add_guards(self._unguarded)

    @property
    def is_pass_announced(self) -> bool:
        """Whether the pass under way was announced, or all parameters are guarded anyway."""
        return not self._unguarded or self._engine is None or bool(self._engine.running_threads)

    def follow_unannounced(self, *, first: bool) -> None:
        """Guard all parameters from now on, as a pass began in C++ code.

        Raises `UsageError` unless the pass is the `first` one, as p.grad may hold earlier gradients
        that this pass has already added to.
        """
        if not first:
            raise UsageError(
                "a backward pass began inside of TorchScript or C++ code after others in Python, "
                "so the gradients from before it are unknown; call loss.backward() in Python"
            )
        self._add_guards(self._unguarded)

    def _add_guards(self, hooks: Sequence[Guarded]) -> None:
        for hook in hooks:
            hook.handles.append(
                hook.node.register_prehook(functools.partial(self._before_accumulation, hook))
            )
        # The first handle is the tracker's own hook after the node.
        if hooks:
            self._unguarded = [hook for hook in self._unguarded if len(hook.handles) == 1]

    def _before_accumulation(self, hook: Guarded, _: Any) -> None:
        if hook.parameter.grad is not None or hook.unsent is not None:
            self._set_apart(hook)


def explain_changed(
    name: str, parameter: Parameter, mean: Tensor, error: RuntimeError
) -> Exception:
    """Explain torch's error on setting p.grad if the parameter has changed after `run.prepare`.

    Args:
        name: Name of the parameter.
        parameter: The parameter, as it is now.
        mean: Gradient that torch has refused as its p.grad.
        error: Error of torch.

    Returns:
        A `UsageError`, or `error` itself if dtype, device and shape are the same.
    """
    if (parameter.dtype, parameter.device, parameter.shape) == (
        mean.dtype,
        mean.device,
        mean.shape,
    ):
        return error
    return UsageError(
        f"the parameter {name} was {list(mean.shape)} {mean.dtype} on {mean.device} in "
        f"run.prepare, and is {list(parameter.shape)} {parameter.dtype} on {parameter.device} now; "
        "call model.to(...), .double(), .half() and the like before run.prepare"
    )
