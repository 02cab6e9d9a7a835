"""Outer optimizers of local SGD: the workers' mean change is taken as it is, or as a gradient.

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
from paceline.formatting import spell


class Outer(Protocol):
    """An outer optimizer: how replicas move from the values they last agreed on."""

    def begin(self, like: Tensor) -> Tensor | None:
        """Return the optimizer's state for a tensor like this, or None if it keeps none."""
        ...

    def move(self, start: Tensor, change: Tensor, memory: Tensor | None) -> None:
        """Move `start` by the mean `change` of all workers; `start` and `memory` are changed in
        place, `change` may be.
        """
        ...


@dataclass(frozen=True)
class average:
    """The mean of the replicas (local SGD, Stich 2018).

    >>> pl.start(sync=pl.LocalSGD(every=16, outer=pl.average()))
    """

    __repr__ = spell

    def begin(self, like: Tensor) -> Tensor | None:
        return None

    def move(self, start: Tensor, change: Tensor, memory: Tensor | None) -> None:
        start.add_(change)


@dataclass(frozen=True)
class nesterov:
    """SGD with Nesterov momentum on the negative mean change.

    >>> pl.start(sync=pl.LocalSGD(every=32, outer=pl.nesterov(0.7, 0.9)))

    DiLoCo (Douillard et al. 2023) uses lr 0.7 and momentum 0.9, the defaults.
    """

    lr: float = 0.7
    momentum: float = 0.9

    __repr__ = spell

    def __post_init__(self) -> None:
        if not self.lr > 0 or not 0 <= self.momentum < 1:
            raise UsageError(f"{self!r}: lr has to be above 0 and momentum from 0 to below 1")

    def begin(self, like: Tensor) -> Tensor | None:
        return torch.zeros_like(like) if self.momentum else None

    def move(self, start: Tensor, change: Tensor, memory: Tensor | None) -> None:
        if memory is None:
            start.add_(change, alpha=self.lr)
            return
        memory.mul_(self.momentum).sub_(change)
        start.add_(change.sub_(memory, alpha=self.momentum), alpha=self.lr)
