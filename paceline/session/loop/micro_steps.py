"""Steps and `zero_grad` of optimizers where a batch is cut into micro-batches: they act on the last, each optimizer for itself.

Two optimizers of one loop body (of a GAN, of a body and its head) step at different places of it, or not in the same turns: what waits for
the step of one is kept, whatever the other has come to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.sync.autograd import GradientTracker

Closure = Callable[[], Any]
TWICE = (
    "with accumulate a step takes what all micro-batches of a batch have added up, so it comes once in a turn of the loop body; leave "
    "accumulate out, with a smaller batch if memory is short, or let each turn take one step"
)


class MicroSteps:
    """What optimizers do within micro-batches, on behalf of one loop."""

    def __init__(self, backward: GradientTracker) -> None:
        self._backward = backward
        self._rates: dict[int, list[Any]] = {}  # by id of the optimizer: its learning rates when the first step of this batch was put off
        self._due: dict[int, int] = {}  # by id of the optimizer: the passes that had begun when its step of this micro-batch was put off

    @property
    def waiting(self) -> bool:
        """Whether steps were put off that have not been made yet."""
        return bool(self._backward.put_off)

    def begin(self, loader: int, *, first: bool) -> None:
        """Begin a micro-batch of a loader (its id). What still waits when another batch begins is added to that."""
        self._due.clear()
        if first:
            self._rates.clear()
        if self._backward.put_off.begin(loader, self._backward.begun, first=first):
            self._backward.owe()

    def put_off(self, optimizer: Any, loader: int) -> None:
        """Let a step wait for the last micro-batch. Raises `UsageError` for a second one on gradients of its own."""
        begun = self._backward.begun
        if self._due.setdefault(id(optimizer), begun) != begun:
            raise UsageError(f"{type(optimizer).__qualname__}.step was called twice in a micro-batch, on different gradients: {TWICE}")
        self._check_rates(optimizer, first=True)
        self._backward.put_off.put_off(_members(optimizer), loader)

    def _check_rates(self, optimizer: Any, *, first: bool) -> None:
        """Raise `UsageError` where a learning rate was changed between micro-batches, as a scheduler does that isn't prepared."""
        now = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        before = self._rates.setdefault(id(optimizer), now) if first else self._rates.pop(id(optimizer), now)
        if before != now:
            raise UsageError(
                f"the learning rate of {type(optimizer).__qualname__} went from {before[0]:g} to {now[0]:g} between micro-batches of one "
                "batch: give its scheduler to run.prepare, too, which then steps with the last of them, or set rates by run.steps"
            )

    def take(self, optimizer: Any) -> None:
        """Have gradients be all that has waited for a step of this optimizer, which comes now."""
        if self._rates:
            self._check_rates(optimizer, first=False)
        if self._backward.put_off and self._backward.put_off.take(_members(optimizer)):
            self._backward.owe()

    def once(self, optimizer: Optimizer, closure: Closure, ready: Callable[[str], None]) -> Closure:
        """Return a closure that makes the gradients of all micro-batches, by going through the last one."""
        calls = 0

        def made() -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise UsageError(f"{type(optimizer).__qualname__} calls its closure twice in a step: {TWICE}")
            result = closure()
            self.take(optimizer)
            ready("optimizer.step")
            return result

        return made

    def clear(self, thing: nn.Module | Optimizer, zero: Closure, trained: Callable[[Parameter], Parameter], loader: int | None) -> Any:
        """Clear the gradients of a model or an optimizer by `zero`, but for what waits for a step, or earlier micro-batches have left."""
        parameters = _members(thing) if isinstance(thing, Optimizer) else (trained(parameter) for parameter in thing.parameters())
        result, waits = self._backward.put_off.clear(parameters, zero, loader)
        if waits:
            self._backward.owe()
        return result


def _members(optimizer: Any) -> Iterator[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
