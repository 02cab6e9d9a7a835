"""Weighted sums of logged numbers, each added up where it is: on the host or on a device."""

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

    The sum is `total` plus `device`. Numbers on a device are added up there, in one float64 scalar.
    """

    total: float = 0.0
    weight: float = 0.0
    device: Tensor | None = None

    def add_number(self, value: float | Tensor, weight: float) -> None:
        """Add a number, or a float64 scalar on a device."""
        self.weight += weight
        if isinstance(value, Tensor):
            # Values of one name may come from several devices. They are added up on the first one.
            self.device = (
                value * weight
                if self.device is None
                else self.device + value.to(self.device.device) * weight
            )
        else:
            self.total += value * weight

    def add_sum(self, other: WeightedSum) -> None:
        """Add the content of another sum."""
        self.total, self.weight = self.total + other.total, self.weight + other.weight
        if other.device is not None:
            self.device = other.device if self.device is None else self.device + other.device

    def pack_sum(self) -> list[float]:
        """Return the sum and its weight. Waits for a device."""
        return [self.total + (0.0 if self.device is None else self.device.item()), self.weight]

    def set_arrived(self, number: float) -> None:
        """Replace the sum on the device by `number`, which was read from there."""
        self.total, self.device = self.total + number, None


class SumsInTransit:
    """Sums of one device on their way to the host."""

    def __init__(self, sums: list[WeightedSum]) -> None:
        self._sums = sums
        # One copy for all sums of the device.
        self._copy = HostCopy(
            torch.stack(
                [weighted_sum.device for weighted_sum in sums if weighted_sum.device is not None]
            ),
            shared=True,
        )

    def has_arrived(self) -> bool:
        """Whether the copy has arrived, so that reading it would not wait."""
        return self._copy.has_arrived()

    def read_sums(self) -> None:
        """Add the numbers that were copied to the sums on the host."""
        for weighted_sum, value in zip(self._sums, self._copy.read_tensor().tolist(), strict=True):
            weighted_sum.set_arrived(value)


def send_to_host(sums: Iterable[WeightedSum]) -> list[SumsInTransit]:
    """Start to copy the parts of sums on devices to the host: one copy for each device."""
    by_device: dict[torch.device, list[WeightedSum]] = {}
    for weighted_sum in sums:
        if weighted_sum.device is not None:
            by_device.setdefault(weighted_sum.device.device, []).append(weighted_sum)
    return [SumsInTransit(group) for group in by_device.values()]


def to_number(name: str, value: Any) -> float | Tensor:
    """Convert a logged value to a float, or to a float64 scalar on its device.

    Reading a value of a device would mean to wait for the device.

    Raises:
        UsageError: The value is not a single real number.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            raise UsageError(
                f"run.log({name}=...) got a {value.dtype} tensor of shape {tuple(value.shape)}; "
                "give one real number, e.g. its mean, or pl.histogram(tensor), or pl.image(tensor)"
            )
        value = value.detach()
        return float(value) if value.device.type == "cpu" else value.reshape(()).to(torch.float64)
    if isinstance(value, numbers.Real | np.bool_):
        return float(value)
    raise UsageError(
        f"run.log({name}=...) got a {type(value).__qualname__}; "
        "give a number or a tensor of one element"
    )
