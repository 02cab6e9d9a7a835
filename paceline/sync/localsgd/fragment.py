"""Fragments: parts of the model whose changes travel together, with the values all last agreed
on, and the state of their round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.comm.bucket_layout import Bucket
from paceline.comm.group_protocol import Work
from paceline.errors import UsageError
from paceline.formatting import spell


@dataclass(frozen=True)
class adaptive:
    """Round lengths that adapt to the distance between replicas.

    >>> pl.start(sync=pl.LocalSGD(every=pl.adaptive(first=8, most=64)))

    A round has twice as many steps as the one before if replicas stay close, and half as many if
    they drift apart. They drift apart when the root mean square of the difference between each
    worker's change and the mean change is more than `drift` times the mean change. They stay close
    below half of that.

    Args:
        first: Steps of the first round. Default: 8.
        least: Fewest steps of a round. Default: 1.
        most: Most steps of a round. Default: 128.
        drift: Limit of the distance, relative to the mean change. Default: 1.
    """

    first: int = 8
    least: int = 1
    most: int = 128
    drift: float = 1.0

    __repr__ = spell

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.first <= self.most or not self.drift > 0:
            raise UsageError(
                f"{self!r}: 1 <= least <= first <= most and drift above 0 have to hold"
            )

    def next(self, every: int, found: float) -> int:
        """Return the steps of the next round, after one of `every` whose drift was `found`."""
        if found > self.drift:
            return max(self.least, every // 2)
        return min(self.most, every * 2) if found < self.drift / 2 else every


@dataclass
class FragmentUnit:
    """A bucket of parameters that travel together, the values all last agreed on, and the outer
    optimizer's state.
    """

    index: int
    bucket: Bucket  # flat: what I have changed, then what all have
    start: Tensor
    memory: Tensor | None
    work: Work[Tensor] | None = None
    begun: int = 0  # when it left, nanoseconds
    carried: Tensor | None = None  # what lost workers had changed, by their parts
    copied: Tensor | None = None  # what I have changed, for a buddy

    def weigh(self, change: Tensor, part: float) -> Tensor:
        """Weight my change by `part`, in place, and add what is carried."""
        change.mul_(part)
        return change if self.carried is None else change.add_(self.carried)


@dataclass
class Fragment:
    """Some units that take turns with those of other fragments, and how far their round has
    come.
    """

    landed: int = 0  # the step after which all last agreed
    units: list[FragmentUnit] = field(default_factory=list)
    steps: int = 0  # since it was last sent
    parts: float = 0.0  # my part of the samples of those, in steps
    length: int = 1  # the steps of what is under way
    mine: float = 0.0  # my part, for that
    weights: float = 1.0  # of all workers, for that, lost ones included
    living: float = 1.0  # of all workers, without those
    lost: float = 0.0  # the part of the samples that is in what is carried, in steps
    flying: bool = False
    here: bool = False  # what flew has come, and perhaps not everywhere
    level: int = -1  # the step after which all replicas were what had come

    def own(self, changed: Callable[[FragmentUnit, Tensor], Tensor]) -> dict[str, Any] | None:
        """Return my weighted changes and what I carry, with my part of the samples in steps; None
        if nothing has changed.

        `changed` writes what I have changed in a unit into memory.
        """
        if not self.flying and not self.steps:
            return None
        part, steps = (
            (self.mine, self.length) if self.flying else (self.parts / self.steps, self.steps)
        )
        changes = []
        for unit in self.units:
            unit.copied = torch.zeros_like(unit.start) if unit.copied is None else unit.copied
            changes.append(unit.weigh(changed(unit, unit.copied), part))
        return {"parts": part * steps + self.lost, "changes": changes}

    def fits(self, theirs: dict[str, Any] | None) -> bool:
        """Whether what another's `own` returned is of the same units."""
        return theirs is None or [change.shape for change in theirs["changes"]] == [
            unit.start.shape for unit in self.units
        ]

    def carry(self, theirs: dict[str, Any]) -> None:
        """Send, from now on, a lost worker's `own` together with my changes."""
        self.lost += theirs["parts"]
        for unit, change in zip(self.units, theirs["changes"], strict=True):
            unit.carried = change if unit.carried is None else unit.carried + change

    def land(self, step: int) -> None:
        """Note that all workers have agreed, after this step."""
        self.flying, self.here, self.landed, self.lost = False, False, step, 0.0
        for unit in self.units:
            unit.carried = None
