"""Optimizers as plain data, so that a server can make the same one: the class among torch's, and
the settings of its groups.

The settings travel again with every step in which they have changed, so schedulers go on working
where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.errors import UsageError

WHOLE = ("Adafactor", "Muon")  # look at all of a matrix: their parameters can't be cut
NAMES = (
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)

Settings = list[dict[str, Any]]  # of each group


def describe(optimizer: Optimizer) -> str:
    """Return the name of an optimizer for `make`.

    Raises `UsageError` for an optimizer that can't be made again elsewhere.
    """
    kind = type(optimizer)
    name = kind.__name__
    if name not in NAMES or getattr(torch.optim, name, None) is not kind:
        raise UsageError(
            f"the optimizer is a {kind.__module__}.{kind.__qualname__}, and a server makes its own "
            "of the same class without your script: "
            f"possible are those of torch.optim ({', '.join(NAMES)}); "
            "for another one use AllReduce or LocalSGD"
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise UsageError(
            f"the {name} has hooks on its step, and it steps on servers, where they are not: "
            "do after optimizer.step() what they do, or use AllReduce"
        )
    return name


def settings(optimizer: Optimizer) -> Settings:
    """Return the present settings of the groups, all but their parameters."""
    return [
        {name: _plain(name, value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(name, part) for part in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(
        f"the setting {name} of an optimizer is a {type(value).__qualname__}, which can't be told "
        "to a server: give a number"
    )


def make(name: str, settings: Settings, parameters: Sequence[Sequence[Parameter]]) -> Optimizer:
    """Make the optimizer of this name, with these parameters in its groups; groups without any
    keep their place.
    """
    if name not in NAMES or len(settings) != len(parameters):
        raise UsageError(f"no optimizer {name} of {len(parameters)} groups can be made here")
    kind: Any = getattr(torch.optim, name)
    # A group has to have parameters when it comes to torch; one that has none here gets a
    # placeholder that never has a gradient.
    groups = [{"params": list(group) or [Parameter(torch.empty(1, 1))]} for group in parameters]
    optimizer: Optimizer = kind(groups, lr=1e-3)
    put(optimizer, settings)
    return optimizer


def put(optimizer: Optimizer, settings: Settings) -> None:
    """Set the settings of the groups."""
    assert len(settings) == len(optimizer.param_groups)
    amend(optimizer, dict(enumerate(settings)))


def changed(before: Settings, now: Settings) -> dict[int, dict[str, Any]]:
    """Return the settings that differ between `before` and `now`, by group."""
    pairs = enumerate(zip(before, now, strict=True))
    differing = {
        group: {name: value for name, value in new.items() if name not in old or old[name] != value}
        for group, (old, new) in pairs
    }
    return {group: values for group, values in differing.items() if values}


def fits(optimizer: Optimizer, found: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise `UsageError` if these can't be settings of the groups: a message may contain
    anything.
    """
    for number, values in found.items():
        if not 0 <= number < len(optimizer.param_groups):
            raise UsageError(
                f"the optimizer has no group {number}: it has {len(optimizer.param_groups)}"
            )
        group = optimizer.param_groups[number]
        for name, value in values.items():
            if name == "params" or not _alike(group.get(name), value):
                raise UsageError(
                    f"group {number} of the optimizer can't have {name}={value!r}: "
                    f"it has {group.get(name)!r}"
                )


def _alike(have: Any, value: Any) -> bool:
    """Whether one value may replace the other."""
    if isinstance(have, tuple | list):
        return (
            isinstance(value, tuple | list)
            and len(value) == len(have)
            and all(map(_alike, have, value))
        )
    if isinstance(have, bool) or not isinstance(have, int | float | Tensor):
        return value is None or have is None or isinstance(value, type(have))
    return isinstance(value, int | float) and not isinstance(value, bool)


def amend(optimizer: Optimizer, found: Mapping[int, Mapping[str, Any]]) -> None:
    """Apply the settings that `changed` found."""
    for number, values in found.items():
        group = optimizer.param_groups[number]
        group.update(
            {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in values.items()
            }
        )


def step(optimizer: Optimizer, part: float) -> None:
    """Step an optimizer with its learning rates times `part`."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] *= part
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def recall(optimizer: Optimizer, parameter: Parameter, memory: dict[str, Any]) -> None:
    """Let an optimizer remember this of a parameter; nothing, where it is empty."""
    if memory:
        optimizer.state[parameter] = memory
    else:
        optimizer.state.pop(parameter, None)
