"""Fragments: parts of the model that are exchanged together, with the state of their round."""

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

    def next(self, every: int, measured_drift: float) -> int:
        """Choose the steps of the next round, after a round of `every` steps with this drift."""
        if measured_drift > self.drift:
            return max(self.least, every // 2)
        return min(self.most, every * 2) if measured_drift < self.drift / 2 else every


@dataclass
class FragmentUnit:
    """A bucket of parameters, with its values after the last round and outer optimizer state."""

    index: int  # of the bucket
    bucket: Bucket  # its flat tensor holds this worker's change, then the sum of all changes
    start: Tensor  # values that all replicas had after the last round
    memory: Tensor | None  # state of the outer optimizer
    work: Work[Tensor] | None = None
    begun: int = 0  # nanoseconds, when the exchange was started
    carried: Tensor | None = None  # changes of lost workers, weighted, to be sent by this one
    copied: Tensor | None = None  # copy of this worker's change, for its buddy

    def weigh(self, change: Tensor, part: float) -> Tensor:
        """Weight this worker's change by `part`, in place, and add the carried changes."""
        change.mul_(part)
        return change if self.carried is None else change.add_(self.carried)


@dataclass
class Fragment:
    """Some units, and the state of their round.

    When a round is sent, `sent_steps` and `own_weight` take over its counts, and `local_steps`
    counts the next round. `in_exchange` is true from then until the mean change has been applied.
    """

    landed: int = 0  # step after which the last round ended
    units: list[FragmentUnit] = field(default_factory=list)
    steps: int = 0  # since the fragment was last sent
    parts: float = 0.0  # sum over these steps of this worker's part of the samples
    length: int = 1  # steps of the round that is on its way
    mine: float = 0.0  # this worker's weight in it: mean part of the samples
    weights: float = 1.0  # sum of the weights of all workers and of lost ones
    living: float = 1.0  # sum of the weights of all workers
    lost: float = 0.0  # like `sample_parts`, of the lost workers whose changes are carried
    flying: bool = False
    here: bool = False  # the sums have arrived on this worker, perhaps not on all
    level: int = -1  # step after which all replicas were equal to `start`; -1 with `alpha`

    def own(self, changed: Callable[[FragmentUnit, Tensor], Tensor]) -> dict[str, Any] | None:
        """Copy this worker's weighted changes, with carried ones; None if nothing has changed.

        `changed(unit, into)` writes this replica's change of a unit into memory.
        """
        if not self.flying and not self.steps:
            return None
        # The change since `start` has the weight of the round on its way, if there is one.
        part, steps = (
            (self.mine, self.length) if self.flying else (self.parts / self.steps, self.steps)
        )
        changes = []
        for unit in self.units:
            unit.copied = torch.zeros_like(unit.start) if unit.copied is None else unit.copied
            changes.append(unit.weigh(changed(unit, unit.copied), part))
        return {"parts": part * steps + self.lost, "changes": changes}

    def fits(self, theirs: dict[str, Any] | None) -> bool:
        """Whether another worker's copied changes have the shapes of these units."""
        return theirs is None or [change.shape for change in theirs["changes"]] == [
            unit.start.shape for unit in self.units
        ]

    def carry(self, theirs: dict[str, Any]) -> None:
        """Send a lost worker's copied changes together with this worker's from now on."""
        self.lost += theirs["parts"]
        for unit, change in zip(self.units, theirs["changes"], strict=True):
            unit.carried = change if unit.carried is None else unit.carried + change

    def land(self, step: int) -> None:
        """End the round after this step: the carried changes have been sent."""
        self.flying, self.here, self.landed, self.lost = False, False, step, 0.0
        for unit in self.units:
            unit.carried = None
