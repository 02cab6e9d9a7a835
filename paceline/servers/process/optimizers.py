"""Optimizers as plain data, so that a server can make the same one.

The data is the name of the class in torch.optim, and the settings of the parameter groups. Changed
settings travel again with the next step, so learning rate schedulers go on working on the workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.errors import UsageError

# Optimizers that need all of a matrix: their parameters can't be cut.
WHOLE_MATRIX_OPTIMIZERS = ("Adafactor", "Muon")
OPTIMIZER_NAMES = (
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

# The settings of each group.
Settings = list[dict[str, Any]]


def get_optimizer_name(optimizer: Optimizer) -> str:
    """Get the name of an optimizer for `make_optimizer`.

    Raises `UsageError` for an optimizer that can't be made on a server.
    """
    kind = type(optimizer)
    name = kind.__name__
    if name not in OPTIMIZER_NAMES or getattr(torch.optim, name, None) is not kind:
        raise UsageError(
            f"the optimizer is a {kind.__module__}.{kind.__qualname__}, and a server makes its own "
            "of the same class without your script: "
            f"possible are those of torch.optim ({', '.join(OPTIMIZER_NAMES)}); "
            "for another one use AllReduce or LocalSGD"
        )
    # Private in torch, and there is no public way to see hooks. If torch renames these attributes,
    # this line raises `AttributeError`.
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise UsageError(
            f"the {name} has hooks on its step, but it steps on servers, which don't have them: "
            "do their work after optimizer.step(), or use AllReduce"
        )
    return name


def read_settings(optimizer: Optimizer) -> Settings:
    """Read the current settings of the groups, all but their parameters."""
    return [
        {name: _convert_setting(name, value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _convert_setting(name: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return [_convert_setting(name, entry) for entry in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(
        f"the setting {name} of an optimizer is a {type(value).__qualname__}, which can't be sent "
        "to a server: give a number"
    )


def make_optimizer(
    name: str, settings: Settings, parameters: Sequence[Sequence[Parameter]]
) -> Optimizer:
    """Make the optimizer of this name with these parameters in its groups.

    Groups without parameters keep their place.
    """
    if name not in OPTIMIZER_NAMES or len(settings) != len(parameters):
        raise UsageError(f"no optimizer {name} of {len(parameters)} groups can be made here")
    kind: Any = getattr(torch.optim, name)
    # torch refuses a group without parameters, so such a group gets a placeholder without a
    # gradient. The learning rate is replaced below.
    groups = [{"params": list(group) or [Parameter(torch.empty(1, 1))]} for group in parameters]
    optimizer: Optimizer = kind(groups, lr=1e-3)
    replace_settings(optimizer, settings)
    return optimizer


def replace_settings(optimizer: Optimizer, settings: Settings) -> None:
    """Set the settings of the groups."""
    assert len(settings) == len(optimizer.param_groups)
    apply_settings(optimizer, dict(enumerate(settings)))


def diff_settings(before: Settings, now: Settings) -> dict[int, dict[str, Any]]:
    """Find the settings that differ between `before` and `now`, by group."""
    pairs = enumerate(zip(before, now, strict=True))
    differing = {
        group: {name: value for name, value in new.items() if name not in old or old[name] != value}
        for group, (old, new) in pairs
    }
    return {group: values for group, values in differing.items() if values}


def check_settings(optimizer: Optimizer, changes: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise `UsageError` if the groups can't have these settings.

    The settings come from a message, which may contain anything.
    """
    for group_index, values in changes.items():
        if not 0 <= group_index < len(optimizer.param_groups):
            raise UsageError(
                f"the optimizer has no group {group_index}: it has {len(optimizer.param_groups)}"
            )
        group = optimizer.param_groups[group_index]
        for name, value in values.items():
            if name == "params" or not _can_replace(group.get(name), value):
                raise UsageError(
                    f"group {group_index} of the optimizer can't have {name}={value!r}: "
                    f"it has {group.get(name)!r}"
                )


def _can_replace(present: Any, replacement: Any) -> bool:
    """Whether a setting may have the second value in place of the first."""
    if isinstance(present, tuple | list):
        return (
            isinstance(replacement, tuple | list)
            and len(replacement) == len(present)
            and all(map(_can_replace, present, replacement))
        )
    if isinstance(present, bool) or not isinstance(present, int | float | Tensor):
        return replacement is None or present is None or isinstance(replacement, type(present))
    return isinstance(replacement, int | float) and not isinstance(replacement, bool)


def apply_settings(optimizer: Optimizer, changes: Mapping[int, Mapping[str, Any]]) -> None:
    """Apply the changes that `diff_settings` found."""
    for group_index, values in changes.items():
        group = optimizer.param_groups[group_index]
        group.update(
            {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in values.items()
            }
        )


def take_step(optimizer: Optimizer, part: float) -> None:
    """Step an optimizer once with its learning rates multiplied by `part`."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] *= part
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def set_optimizer_state(optimizer: Optimizer, parameter: Parameter, memory: dict[str, Any]) -> None:
    """Set the optimizer's state of a parameter. An empty state removes it."""
    if memory:
        optimizer.state[parameter] = memory
    else:
        optimizer.state.pop(parameter, None)
