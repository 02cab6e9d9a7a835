"""Outer optimizers of local SGD: they apply the mean change of all workers to the replicas.

x0: values after the last round    change: mean change since then    x: values after this round

average     x = x0 + change
nesterov    v = momentum v - change;  x = x0 - lr (momentum v - change)
            DiLoCo (Douillard et al. 2023)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.formatting import format_as_call


class Outer(Protocol):
    """An outer optimizer: it applies the mean change of a round."""

    def begin(self, like: Tensor) -> Tensor | None:
        """Make the optimizer's state for a tensor; None if it keeps none."""
        ...

    def move(self, start: Tensor, change: Tensor, memory: Tensor | None) -> None:
        """Move `start` by the mean change of all workers, in place.

        Args:
            start: Values that all replicas had after the last round.
            change: Mean change since then. May be written to.
            memory: Result of `begin`, changed in place.
        """
        ...


@dataclass(frozen=True)
class average:
    """The mean of the replicas (local SGD, Stich 2018).

    >>> pl.start(sync=pl.LocalSGD(every=16, outer=pl.average()))
    """

    __repr__ = format_as_call

    def begin(self, like: Tensor) -> Tensor | None:
        return None

    def move(self, start: Tensor, change: Tensor, memory: Tensor | None) -> None:
        start.add_(change)


@dataclass(frozen=True)
class nesterov:
    """SGD with Nesterov momentum on the negative mean change.

    >>> pl.start(sync=pl.LocalSGD(every=32, outer=pl.nesterov(0.7, 0.9)))

    The defaults are those of DiLoCo (Douillard et al. 2023).

    Args:
        lr: Learning rate of the outer optimizer. Default: 0.7.
        momentum: Momentum, 0 to below 1. Default: 0.9.
    """

    lr: float = 0.7
    momentum: float = 0.9

    __repr__ = format_as_call

    def __post_init__(self) -> None:
        if not self.lr > 0 or not 0 <= self.momentum < 1:
            raise UsageError(f"{self!r}: lr must be above 0 and momentum from 0 to below 1")

    def begin(self, like: Tensor) -> Tensor | None:
        return torch.zeros_like(like) if self.momentum else None

    def move(self, start: Tensor, change: Tensor, memory: Tensor | None) -> None:
        if memory is None:
            start.add_(change, alpha=self.lr)
            return
        # `change` is the negative gradient, so signs are turned around compared with torch's SGD.
        memory.mul_(self.momentum).sub_(change)
        start.add_(change.sub_(memory, alpha=self.momentum), alpha=self.lr)
