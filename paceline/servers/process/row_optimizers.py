"""Optimizers of single rows of a table: the initial values of rows, and the step of the rows that
have a gradient.

Both are lazy, and both give what torch gives for the whole table: a row that no batch has used
keeps the value that follows from the seed and its number, and a step without a gradient leaves it
as it is (SGD without momentum, Adagrad; SparseAdam is defined so).

    row r, columns 2c and 2c + 1:    mix(mix(seed) + r * pairs + c) -> two halves of 32 bits -> two
                                     normal numbers (Box-Muller)
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

_ODD: Final = 0x9E3779B97F4A7C15
_ALL: Final = (1 << 64) - 1
# rows whose first values are made in one go: their hashes take some memory
AT_ONCE: Final = 1 << 16

Settings = Mapping[str, Any]


def mix(words: Any) -> Any:
    """Return the finaliser of splitmix64 (Steele, Lea, Flood 2014), on an array of uint64: each
    bit depends on all bits.
    """
    words = words + np.uint64(_ODD)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def initial(ids: Tensor, dim: int, dtype: torch.dtype, *, seed: int, std: float) -> Tensor:
    """Return the initial values of these rows (1-D, int64): normal numbers around 0 with this
    deviation, by seed and row alone.
    """
    values = torch.empty(len(ids), dim, dtype=dtype)
    for start in range(0, len(ids), AT_ONCE):
        values[start : start + AT_ONCE] = _normal(
            ids[start : start + AT_ONCE].numpy(), dim, seed
        ).mul_(std)
    return values


def _normal(ids: Any, dim: int, seed: int) -> Tensor:
    pairs = -(-dim // 2)
    begin = mix(np.array([seed & _ALL], dtype=np.uint64))
    bits = mix(
        begin
        + (ids.astype(np.uint64) * np.uint64(pairs))[:, None]
        + np.arange(pairs, dtype=np.uint64)
    )
    upper, lower = (
        (bits >> np.uint64(32)).astype(np.float64),
        (bits & np.uint64(0xFFFFFFFF)).astype(np.float64),
    )
    radius, angle = torch.from_numpy(upper), torch.from_numpy(lower)
    radius = radius.add_(0.5).mul_(2.0**-32).log_().mul_(-2).sqrt_()  # never of 0
    angle = angle.mul_(2 * math.pi * 2.0**-32)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=2).view(
        len(ids), 2 * pairs
    )[:, :dim]


class RowRule(NamedTuple):
    """The rule of an optimizer for rows: the state that it keeps of each (names), and the step.

    `step` changes the values and the state in place; it takes them, the gradient, the settings, and
    the number of the step.
    """

    remembers: tuple[str, ...]
    step: Callable[[list[Tensor], Tensor, Settings, int], None]
    # what it remembers of a row before its first step
    first: Callable[[Settings], float] = lambda settings: 0.0
    plain: Mapping[str, Any] = {}  # settings that have to be this: another value can't be honoured


def _sgd(rows: list[Tensor], grad: Tensor, settings: Settings, count: int) -> None:
    rows[0].add_(grad, alpha=-settings["lr"])


def _adagrad(rows: list[Tensor], grad: Tensor, settings: Settings, count: int) -> None:
    values, total = rows
    rate = settings["lr"] / (1 + (count - 1) * settings["lr_decay"])
    total.addcmul_(grad, grad)
    values.addcdiv_(grad, total.sqrt().add_(settings["eps"]), value=-rate)


def _adam(rows: list[Tensor], grad: Tensor, settings: Settings, count: int) -> None:
    values, mean, square = rows
    beta1, beta2 = settings["betas"]
    mean.add_(grad - mean, alpha=1 - beta1)
    square.add_(grad.square().sub_(square), alpha=1 - beta2)
    rate = settings["lr"] * math.sqrt(1 - beta2**count) / (1 - beta1**count)
    values.addcdiv_(mean, square.sqrt().add_(settings["eps"]), value=-rate)


_PLAIN: Final = {"weight_decay": 0, "maximize": False, "differentiable": False}
RULES: Final[Mapping[str, RowRule]] = {
    "SGD": RowRule((), _sgd, plain={**_PLAIN, "momentum": 0, "dampening": 0, "nesterov": False}),
    "Adagrad": RowRule(
        ("sum",), _adagrad, lambda settings: float(settings["initial_accumulator_value"]), _PLAIN
    ),
    "SparseAdam": RowRule(("exp_avg", "exp_avg_sq"), _adam, plain={"maximize": False}),
}
_INSTEAD: Final = {name: "SparseAdam" for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax")}
# all else in a group says how torch computes
_USED: Final = {"lr", "lr_decay", "eps", "betas", "initial_accumulator_value"}


def described(name: str, optimizer: Optimizer, group: int) -> tuple[str, dict[str, Any]]:
    """Return the rule and the settings for the table `name`, which is in this group.

    Raises `UsageError` for what servers can't do to single rows.
    """
    kind = type(optimizer)
    if RULES.get(kind.__name__) is None or getattr(torch.optim, kind.__name__) is not kind:
        other = _INSTEAD.get(kind.__name__, "SGD, Adagrad or SparseAdam")
        raise UsageError(
            f"the sparse table {name} is in a {kind.__module__}.{kind.__qualname__}, which changes "
            "rows that no batch has used: give its "
            f"parameters to an optimizer of their own, torch.optim.{other}; "
            f"possible are {', '.join(RULES)}"
        )
    return kind.__name__, settings(name, optimizer, group)


def settings(name: str, optimizer: Optimizer, group: int) -> dict[str, Any]:
    """Return the present settings of the group, as the rule reads them.

    Raises `UsageError` for a value that can't be honoured.
    """
    values = optimizers.settings(optimizer)[group]
    for setting, wanted in RULES[type(optimizer).__name__].plain.items():
        if values.get(setting, wanted) != wanted:
            raise UsageError(
                f"the sparse table {name} is in a {type(optimizer).__name__} with "
                f"{setting}={values[setting]!r}, which would change rows "
                "that no batch has used, or can't be done to single rows: "
                f"put it in a group of its own with {setting}={wanted!r}"
            )
    return {setting: value for setting, value in values.items() if setting in _USED}


def check(name: str, found: Settings) -> RowRule:
    """Find the rule of this name, if these are its settings; raises `UsageError` (on a server,
    for what has come).
    """
    wanted = {
        "SGD": ("lr",),
        "Adagrad": ("lr", "lr_decay", "eps", "initial_accumulator_value"),
        "SparseAdam": ("lr", "betas", "eps"),
    }
    if name not in RULES or any(
        not _number(found.get(setting), pair=setting == "betas") for setting in wanted[name]
    ):
        raise UsageError(f"no rows can be stepped by {name} with {dict(found)}")
    return RULES[name]


def _number(value: Any, *, pair: bool) -> bool:
    if pair:
        return (
            isinstance(value, list | tuple)
            and len(value) == 2
            and all(_number(part, pair=False) for part in value)
        )
    return isinstance(value, int | float)


def summed(
    pushed: Sequence[tuple[Tensor, Tensor]], dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Sum the `pushed` (ids, each once, and gradients): all rows that are in any of them,
    sorted, and the sums in that order.
    """
    if len(pushed) == 1:
        return pushed[0]
    ids, places = torch.unique(torch.cat([ids for ids, _ in pushed]), return_inverse=True)
    total, end = torch.zeros(len(ids), dim, dtype=dtype), 0
    for mine, grad in pushed:
        begin, end = end, end + len(mine)
        total.index_add_(0, places[begin:end], grad)
    return ids, total
