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
from paceline.formatting import format_as_call


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

    __repr__ = format_as_call

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.first <= self.most or not self.drift > 0:
            raise UsageError(
                f"{self!r}: 1 <= least <= first <= most and drift above 0 have to hold"
            )

    def next_steps(self, every: int, measured_drift: float) -> int:
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
    started_ns: int = 0  # nanoseconds, when the exchange was started
    # Changes of lost workers, weighted, which this worker sends together with its own.
    carried_change: Tensor | None = None
    copied_change: Tensor | None = None  # copy of this worker's change, for its buddy

    def weight_change(self, change: Tensor, part: float) -> Tensor:
        """Weight this worker's change by `part`, in place, and add the carried changes."""
        change.mul_(part)
        return change if self.carried_change is None else change.add_(self.carried_change)

    def continue_unit(self, old: FragmentUnit) -> None:
        """Continue the round of a unit of the same parameters, in this unit's bucket."""
        self.start, self.memory = old.start, old.memory
        self.carried_change, self.copied_change = old.carried_change, old.copied_change


@dataclass
class Fragment:
    """Some units, and the state of their round.

    When a round is sent, `sent_steps` and `own_weight` take over its counts, and `local_steps`
    counts the next round. `in_exchange` is true from then until the mean change has been applied.
    """

    ended_step: int = 0  # step after which the last round ended
    units: list[FragmentUnit] = field(default_factory=list)
    steps_made: int = 0  # since the fragment was last sent
    sample_parts: float = 0.0  # sum over these steps of this worker's part of the samples
    sent_steps: int = 1  # steps of the round that is on its way
    own_weight: float = 0.0  # this worker's weight in it: mean part of the samples
    total_weight: float = 1.0  # sum of the weights of all workers and of lost ones
    present_weight: float = 1.0  # sum of the weights of all workers
    carried_parts: float = 0.0  # like `sample_parts`, of the lost workers whose changes are carried
    in_exchange: bool = False
    has_arrived: bool = False  # the sums have arrived on this worker, perhaps not on all
    equal_step: int = -1  # step after which all replicas were equal to `start`; -1 with `alpha`

    def copy_changes(
        self, changed: Callable[[FragmentUnit, Tensor], Tensor]
    ) -> dict[str, Any] | None:
        """Copy this worker's weighted changes, with carried ones; None if nothing has changed.

        `changed(unit, into)` writes this replica's change of a unit into memory.
        """
        if not self.in_exchange and not self.steps_made:
            return None
        # The change since `start` has the weight of the round on its way, if there is one.
        part, steps = (
            (self.own_weight, self.sent_steps)
            if self.in_exchange
            else (self.sample_parts / self.steps_made, self.steps_made)
        )
        changes = []
        for unit in self.units:
            unit.copied_change = (
                torch.zeros_like(unit.start) if unit.copied_change is None else unit.copied_change
            )
            changes.append(unit.weight_change(changed(unit, unit.copied_change), part))
        return {"parts": part * steps + self.carried_parts, "changes": changes}

    def has_shapes_of(self, theirs: dict[str, Any] | None) -> bool:
        """Whether another worker's copied changes have the shapes of these units."""
        return theirs is None or [change.shape for change in theirs["changes"]] == [
            unit.start.shape for unit in self.units
        ]

    def carry_changes(self, theirs: dict[str, Any]) -> None:
        """Send a lost worker's copied changes together with this worker's from now on."""
        self.carried_parts += theirs["parts"]
        for unit, change in zip(self.units, theirs["changes"], strict=True):
            unit.carried_change = (
                change if unit.carried_change is None else unit.carried_change + change
            )

    def end_round(self, step: int) -> None:
        """End the round after this step: the carried changes have been sent."""
        self.in_exchange, self.has_arrived, self.ended_step, self.carried_parts = (
            False,
            False,
            step,
            0.0,
        )
        for unit in self.units:
            unit.carried_change = None
