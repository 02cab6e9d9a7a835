"""Gives an optimizer that was made before its model was cut the parameters that there are now, in their order and with their options."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.errors import UsageError


def repoint(optimizer: Optimizer, renewed: Callable[[Parameter], Parameter | None]) -> None:
    """Let an optimizer step `renewed(p)` in the place of each of its parameters p (None: p stays).

    Raises `UsageError`, and changes nothing, where it remembers something of a parameter that would leave.
    """
    found = [[renewed(p) for p in group["params"]] for group in optimizer.param_groups]
    for group, others in zip(optimizer.param_groups, found, strict=True):
        refuse_memory(optimizer, (p for p, other in zip(group["params"], others, strict=True) if other is not None))
    for group, others in zip(optimizer.param_groups, found, strict=True):
        group["params"] = [p if other is None else other for p, other in zip(group["params"], others, strict=True)]


def refuse_memory(optimizer: Optimizer, cut: Iterable[Parameter]) -> None:
    """Raise `UsageError` where an optimizer remembers something of parameters that are cut."""
    if any(optimizer.state.get(parameter) for parameter in cut):
        raise UsageError(
            f"the {type(optimizer).__qualname__} remembers something of parameters that are cut now (it has stepped, or got a state): "
            "prepare both before it steps, and load states with run.resume"
        )
