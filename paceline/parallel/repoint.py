"""Gives an optimizer that was made before its model was cut the model's new parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.nn import Parameter
from torch.optim import Adagrad, Optimizer

from paceline.errors import UsageError


def repoint_optimizer(
    optimizer: Optimizer, renewed: Callable[[Parameter], Parameter | None]
) -> None:
    """Let an optimizer step `renewed(p)` in the place of each of its parameters p (None: p stays).

    Raises `UsageError`, and changes nothing, if it has state of a parameter that would be replaced.
    """
    replacements = [[renewed(p) for p in group["params"]] for group in optimizer.param_groups]
    # Refuse before anything is changed.
    for group, others in zip(optimizer.param_groups, replacements, strict=True):
        refuse_optimizer_state(
            optimizer,
            (p for p, other in zip(group["params"], others, strict=True) if other is not None),
        )
    for group, others in zip(optimizer.param_groups, replacements, strict=True):
        for p, other in zip(group["params"], others, strict=True):
            if other is not None and (state := optimizer.state.pop(p, None)):
                optimizer.state[other] = state
        group["params"] = [
            p if other is None else other for p, other in zip(group["params"], others, strict=True)
        ]


def refuse_optimizer_state(optimizer: Optimizer, cut: Iterable[Parameter]) -> None:
    """Raise `UsageError` if an optimizer has state of cut parameters, but for a new Adagrad's."""
    if any(
        (state := optimizer.state.get(parameter))
        and not (isinstance(optimizer, Adagrad) and state["step"] == 0)
        for parameter in cut
    ):
        raise UsageError(
            f"the {type(optimizer).__qualname__} remembers something of parameters that are cut "
            "now (it has stepped, or loaded a state): "
            "call run.prepare before its first step, and load states with run.resume"
        )


def reset_adagrad_sums(optimizer: Optimizer) -> None:
    """Give a new Adagrad sums in the shapes of its parameters.

    Adagrad is the one optimizer of torch that makes its state in the constructor. So it has sums
    for the whole parameters from before the cut.
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
