"""Numbers that are logged: weighted sums of one value in one step, which are added up where they
are, on the host or on a device.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.record.logged.host_copy import HostCopy


@dataclass
class WeightedSum:
    """The weighted sum of one value in one step.

    Numbers on a device are added up there, as one float64 scalar.
    """

    total: float = 0.0
    weight: float = 0.0
    device: Tensor | None = None

    def add(self, number: float | Tensor, weight: float) -> None:
        """Add a number, or a float64 scalar on a device."""
        self.weight += weight
        if isinstance(number, Tensor):
            self.device = (
                number * weight
                if self.device is None
                else self.device + number.to(self.device.device) * weight
            )
        else:
            self.total += number * weight

    def take_in(self, other: WeightedSum) -> None:
        """Add what another sum holds."""
        self.total, self.weight = self.total + other.total, self.weight + other.weight
        if other.device is not None:
            self.device = other.device if self.device is None else self.device + other.device

    def packed(self) -> list[float]:
        """Return the sum and its weight; it waits for a device."""
        return [self.total + (0.0 if self.device is None else self.device.item()), self.weight]

    def arrive(self, number: float) -> None:
        """Take in what has come from the device."""
        self.total, self.device = self.total + number, None


class SumsOnTheirWay:
    """Sums of one device on their way to the host."""

    def __init__(self, sums: list[WeightedSum]) -> None:
        self._sums = sums
        self._copy = HostCopy(
            torch.stack([each.device for each in sums if each.device is not None]), shared=True
        )

    def done(self) -> bool:
        """Whether `read` would not wait."""
        return self._copy.done()

    def read(self) -> None:
        """Add what has come to the sums on the host."""
        for each, number in zip(self._sums, self._copy.read().tolist(), strict=True):
            each.arrive(number)


def send(sums: Iterable[WeightedSum]) -> list[SumsOnTheirWay]:
    """Begin to copy to the host what sums have on devices: one copy for each device."""
    by_device: dict[torch.device, list[WeightedSum]] = {}
    for each in sums:
        if each.device is not None:
            by_device.setdefault(each.device.device, []).append(each)
    return [SumsOnTheirWay(group) for group in by_device.values()]


def number(name: str, value: Any) -> float | Tensor:
    """Return `value` as a float, or as a float64 scalar on its device where reading it could
    mean to wait.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            raise UsageError(
                f"run.log({name}=...) got a {value.dtype} tensor of shape {tuple(value.shape)}; "
                "give one real number, e.g. its mean, "
                "or pl.histogram(tensor), or pl.image(tensor)"
            )
        value = value.detach()
        return float(value) if value.device.type == "cpu" else value.reshape(()).to(torch.float64)
    if isinstance(value, numbers.Real | np.bool_):
        return float(value)
    raise UsageError(
        f"run.log({name}=...) got a {type(value).__qualname__}; give a number or a tensor of one "
        "element"
    )
