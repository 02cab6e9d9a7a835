"""Gives an optimizer that was made before its model was cut the parameters that there are now,
in their order and with their options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.nn import Parameter
from torch.optim import Adagrad, Optimizer

from paceline.errors import UsageError


def repoint(optimizer: Optimizer, renewed: Callable[[Parameter], Parameter | None]) -> None:
    """Let an optimizer step `renewed(p)` in the place of each of its parameters p (None: p stays).

    Raises `UsageError`, and changes nothing, where it remembers something of a parameter that would
    leave.
    """
    found = [[renewed(p) for p in group["params"]] for group in optimizer.param_groups]
    for group, others in zip(optimizer.param_groups, found, strict=True):
        refuse_memory(
            optimizer,
            (p for p, other in zip(group["params"], others, strict=True) if other is not None),
        )
    for group, others in zip(optimizer.param_groups, found, strict=True):
        for p, other in zip(group["params"], others, strict=True):
            if other is not None and (state := optimizer.state.pop(p, None)):
                optimizer.state[other] = state
        group["params"] = [
            p if other is None else other for p, other in zip(group["params"], others, strict=True)
        ]


def refuse_memory(optimizer: Optimizer, cut: Iterable[Parameter]) -> None:
    """Raise `UsageError` where an optimizer remembers something of parameters that are cut, but
    for what an Adagrad begins with.
    """
    if any(
        (state := optimizer.state.get(parameter))
        and not (isinstance(optimizer, Adagrad) and state["step"] == 0)
        for parameter in cut
    ):
        raise UsageError(
            f"the {type(optimizer).__qualname__} remembers something of parameters that are cut "
            "now (it has stepped, or got a state): "
            "prepare both before it steps, and load states with run.resume"
        )


def begin_sums(optimizer: Optimizer) -> None:
    """Give an Adagrad sums of the shapes of its parameters: made before its model was cut, it
    has those of whole ones from its start.
    """
    for group in optimizer.param_groups if isinstance(optimizer, Adagrad) else ():
        for p in group["params"]:
            state = optimizer.state[p]
            if state["step"] == 0 and (
                state["sum"].shape != p.shape or state["sum"].device != p.device
            ):
                state["sum"] = torch.full_like(
                    p, group["initial_accumulator_value"], requires_grad=False
                )
