"""Optimizers of single rows of a table: their initial values, and the step of rows with a gradient.

Both are lazy, and both give the same result as torch does for the whole table. A row that no batch
has used keeps its initial value, which follows from the seed and the row's number. A step without a
gradient for a row leaves the row as it is: that holds for SGD without momentum and Adagrad, and
SparseAdam is defined so.

    row r, columns 2c and 2c + 1:    mix_bits(mix_bits(seed) + r * pairs + c) -> two halves of 32
                                     bits -> two normal numbers (Box-Muller)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.servers.process import optimizers

# The increment of splitmix64: 2 ** 64 divided by the golden ratio, made odd.
_GOLDEN_INCREMENT: Final = 0x9E3779B97F4A7C15
_UINT64_MASK: Final = (1 << 64) - 1
# Number of rows that are handled at a time, because their hashes take memory.
ROWS_AT_A_TIME: Final = 1 << 16

Settings = Mapping[str, Any]


def mix_bits(bits: Any) -> Any:
    """Mix an array of uint64 so that each bit of the result depends on all bits of a word.

    This is the finalizer of splitmix64 (Steele, Lea, Flood 2014).
    """
    bits = bits + np.uint64(_GOLDEN_INCREMENT)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def make_initial_values(
    ids: Tensor, dim: int, dtype: torch.dtype, *, seed: int, std: float
) -> Tensor:
    """Make initial values: normal numbers with mean 0, by seed and row alone.

    Args:
        ids: The rows, int64, [n].
        dim: Number of columns.
        dtype: Dtype of the result.
        seed: Seed of the table.
        std: Standard deviation.

    Returns:
        The values, [n, dim].
    """
    values = torch.empty(len(ids), dim, dtype=dtype)
    for start in range(0, len(ids), ROWS_AT_A_TIME):
        values[start : start + ROWS_AT_A_TIME] = _draw_normal_numbers(
            ids[start : start + ROWS_AT_A_TIME].numpy(), dim, seed
        ).mul_(std)
    return values


def _draw_normal_numbers(ids: Any, dim: int, seed: int) -> Tensor:
    pairs = -(-dim // 2)
    # Rows have disjoint ranges of counters, one counter for each pair of columns.
    begin = mix_bits(np.array([seed & _UINT64_MASK], dtype=np.uint64))
    bits = mix_bits(
        begin
        + (ids.astype(np.uint64) * np.uint64(pairs))[:, None]
        + np.arange(pairs, dtype=np.uint64)
    )
    upper, lower = (
        (bits >> np.uint64(32)).astype(np.float64),
        (bits & np.uint64(0xFFFFFFFF)).astype(np.float64),
    )
    radius, angle = torch.from_numpy(upper), torch.from_numpy(lower)
    # Box-Muller: adding 0.5 keeps the logarithm away from 0.
    radius = radius.add_(0.5).mul_(2.0**-32).log_().mul_(-2).sqrt_()
    angle = angle.mul_(2 * math.pi * 2.0**-32)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=2).view(
        len(ids), 2 * pairs
    )[:, :dim]


class RowRule(NamedTuple):
    """The rule of an optimizer for single rows.

    `state_names` are the names of the state tensors of each row. `step` takes the rows (values,
    then states), the gradient, the settings, and the number of the step. It changes the rows in
    place.
    """

    state_names: tuple[str, ...]
    step: Callable[[list[Tensor], Tensor, Settings, int], None]
    # The value of a row's states before its first step, from the settings.
    make_initial_state: Callable[[Settings], float] = lambda settings: 0.0
    # Settings that must have this value, because single rows can't honour another.
    required_settings: Mapping[str, Any] = {}


def _step_sgd(rows: list[Tensor], grad: Tensor, settings: Settings, count: int) -> None:
    rows[0].add_(grad, alpha=-settings["lr"])


def _step_adagrad(rows: list[Tensor], grad: Tensor, settings: Settings, count: int) -> None:
    values, total = rows
    rate = settings["lr"] / (1 + (count - 1) * settings["lr_decay"])
    total.addcmul_(grad, grad)
    values.addcdiv_(grad, total.sqrt().add_(settings["eps"]), value=-rate)


def _step_adam(rows: list[Tensor], grad: Tensor, settings: Settings, count: int) -> None:
    values, mean, mean_square = rows
    beta1, beta2 = settings["betas"]
    mean.add_(grad - mean, alpha=1 - beta1)
    mean_square.add_(grad.square().sub_(mean_square), alpha=1 - beta2)
    rate = settings["lr"] * math.sqrt(1 - beta2**count) / (1 - beta1**count)
    values.addcdiv_(mean, mean_square.sqrt().add_(settings["eps"]), value=-rate)


# Weight decay (and momentum, for SGD) would also change rows without a gradient.
_REQUIRED_SETTINGS: Final = {"weight_decay": 0, "maximize": False, "differentiable": False}
ROW_RULES: Final[Mapping[str, RowRule]] = {
    "SGD": RowRule(
        (),
        _step_sgd,
        required_settings={**_REQUIRED_SETTINGS, "momentum": 0, "dampening": 0, "nesterov": False},
    ),
    "Adagrad": RowRule(
        ("sum",),
        _step_adagrad,
        lambda settings: float(settings["initial_accumulator_value"]),
        _REQUIRED_SETTINGS,
    ),
    "SparseAdam": RowRule(
        ("exp_avg", "exp_avg_sq"), _step_adam, required_settings={"maximize": False}
    ),
}
# The optimizer to recommend in place of one that changes all rows.
_ALTERNATIVES: Final = {
    name: "SparseAdam" for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax")
}
# Settings that a rule reads. All others say how torch computes.
_RULE_SETTINGS: Final = {"lr", "lr_decay", "eps", "betas", "initial_accumulator_value"}


def describe_row_optimizer(
    name: str, optimizer: Optimizer, group: int
) -> tuple[str, dict[str, Any]]:
    """Get the name of the rule and the settings for the table `name`, which is in this group.

    Raises `UsageError` for an optimizer or a setting that single rows can't honour.
    """
    kind = type(optimizer)
    if ROW_RULES.get(kind.__name__) is None or getattr(torch.optim, kind.__name__) is not kind:
        other = _ALTERNATIVES.get(kind.__name__, "SGD, Adagrad or SparseAdam")
        raise UsageError(
            f"the sparse table {name} is in a {kind.__module__}.{kind.__qualname__}, which changes "
            "rows that no batch has used: give its "
            f"parameters to an optimizer of their own, torch.optim.{other}; "
            f"possible are {', '.join(ROW_RULES)}"
        )
    return kind.__name__, read_row_settings(name, optimizer, group)


def read_row_settings(name: str, optimizer: Optimizer, group: int) -> dict[str, Any]:
    """Get the current settings of the group of the table `name`, as the rule reads them.

    Raises `UsageError` for a value that can't be honoured.
    """
    values = optimizers.read_settings(optimizer)[group]
    for setting, wanted in ROW_RULES[type(optimizer).__name__].required_settings.items():
        if values.get(setting, wanted) != wanted:
            raise UsageError(
                f"the sparse table {name} is in a {type(optimizer).__name__} with "
                f"{setting}={values[setting]!r}, which would change rows "
                "that no batch has used, or can't be done to single rows: "
                f"put it in a group of its own with {setting}={wanted!r}"
            )
    return {setting: value for setting, value in values.items() if setting in _RULE_SETTINGS}


def find_rule(name: str, settings: Settings) -> RowRule:
    """Find the rule of this name. Raises `UsageError` unless the settings fit the rule.

    A server calls this for settings from a message.
    """
    settings_of_rule = {
        "SGD": ("lr",),
        "Adagrad": ("lr", "lr_decay", "eps", "initial_accumulator_value"),
        "SparseAdam": ("lr", "betas", "eps"),
    }
    if name not in ROW_RULES or any(
        not _is_number(settings.get(setting), pair=setting == "betas")
        for setting in settings_of_rule[name]
    ):
        raise UsageError(f"no rows can be stepped by {name} with {dict(settings)}")
    return ROW_RULES[name]


def _is_number(value: Any, *, pair: bool) -> bool:
    if pair:
        return (
            isinstance(value, list | tuple)
            and len(value) == 2
            and all(_is_number(part, pair=False) for part in value)
        )
    return isinstance(value, int | float)


def sum_row_gradients(
    pushed: Sequence[tuple[Tensor, Tensor]], dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Sum the gradients of several workers.

    Args:
        pushed: For each worker its rows, each once, and their gradients.
        dim: Number of columns.
        dtype: Dtype of the sum.

    Returns:
        All rows of any worker, in rising order, and the sums.
    """
    if len(pushed) == 1:
        return pushed[0]
    ids, places = torch.unique(torch.cat([ids for ids, _ in pushed]), return_inverse=True)
    # One worker after another, so that the order of the additions is always the same.
    total, end = torch.zeros(len(ids), dim, dtype=dtype), 0
    for worker_ids, grad in pushed:
        begin, end = end, end + len(worker_ids)
        total.index_add_(0, places[begin:end], grad)
    return ids, total
