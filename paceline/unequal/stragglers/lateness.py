"""Computes how late each worker is in each step, and why.

own work of a step, ms       compute  data  collection  ...   late, ms    because of
rank 0                          40      5        0                0
rank 1                          40      5        0                0
rank 2                          40      5        4                4        collection 4
rank 3                          42     25        0               22        data 20, compute 2
usual (the lower median)        40      5        0               (45 in all)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.record.logged.record import LogRecord
from paceline.trace import STEP_PARTS
from paceline.unequal.stragglers.causes import CAUSES, WORDS

Seconds = NDArray[np.float64]


class RankLateness(NamedTuple):
    """Seconds by which a rank was later than usual, in one step or a mean one, by cause.

    The values of `by_cause` add up to the whole lateness.
    """

    rank: int
    by_cause: dict[str, float]

    @property
    def seconds(self) -> float:
        """Seconds of lateness for all causes together."""
        return sum(self.by_cause.values())

    @property
    def cause(self) -> str:
        """Cause that took the most time, in words."""
        return WORDS[find_main_cause(self.by_cause)]


def find_main_cause(by_cause: Mapping[str, float]) -> str:
    """Find the cause that took the most time."""
    return max(by_cause, key=by_cause.__getitem__)


def compute_lateness(work: Seconds) -> Seconds:
    """Compute the lateness of each rank in each step, by cause.

    A rank is late by its time above the lower median of all ranks, so at least half of the ranks
    are never late. The lateness is divided among causes in proportion to their excess over the
    lower median. If processors are crowded for all ranks, a rank with more work loses more time to
    other programs: the part of that loss that is usual for its work counts as work.

    Args:
        work: Seconds of own work, with axes (steps, ranks, CAUSES).

    Returns:
        Seconds of lateness, with the same axes.
    """
    work = _even_out_stolen(work)
    ranks = work.shape[1]
    middle = (ranks - 1) // 2
    own = work.sum(axis=2)
    late = np.maximum(own - np.partition(own, middle, axis=1)[:, middle : middle + 1], 0.0)
    more = np.maximum(work - np.partition(work, middle, axis=1)[:, middle : middle + 1], 0.0)
    excess = more.sum(axis=2)
    by_cause: Seconds = (
        more * np.divide(late, excess, out=np.zeros_like(late), where=excess > 0)[:, :, None]
    )
    return by_cause


def _even_out_stolen(work: Seconds) -> Seconds:
    """Count the usual loss to a stolen processor as work; sums of each rank stay the same."""
    middle, stolen = (work.shape[1] - 1) // 2, CAUSES.index("stolen")
    busy = work[:, :, :stolen].sum(axis=2)
    # The usual loss per second of work is taken over all steps, as a single step is mostly chance.
    total, lost = busy.sum(axis=0), work[:, :, stolen].sum(axis=0)
    losses = np.divide(lost, total, out=np.zeros_like(total), where=total > 0)
    usual = np.partition(losses, middle)[middle]

    # No rank can move more to its work than was stolen from it in that step.
    moved = np.minimum(
        np.divide(work[:, :, stolen], busy, out=np.zeros_like(busy), where=busy > 0), usual
    )
    evened = work.copy()
    evened[:, :, :stolen] *= 1 + moved[:, :, None]
    evened[:, :, stolen] -= moved * busy
    return evened


def find_latest_rank(late: Seconds, ranks: Sequence[int]) -> RankLateness:
    """Find the rank that was latest in the mean of these steps."""
    means = late.mean(axis=0)
    latest = int(means.sum(axis=1).argmax())
    return RankLateness(ranks[latest], _name_causes(means[latest]))


def _name_causes(seconds: Seconds) -> dict[str, float]:
    return {cause: float(value) for cause, value in zip(CAUSES, seconds, strict=True)}


class LatenessTotals:
    """Lateness of ranks: summed over all steps, and for each of the last steps.

    `last` is the number of steps that are remembered one by one.
    """

    def __init__(self, last: int) -> None:
        self._last = last
        self._sums: dict[int, Seconds] = {}
        self._steps: dict[int, int] = {}
        self._recent: dict[int, list[RankLateness]] = {}  # by step

    def add_steps(self, steps: Sequence[int], ranks: Sequence[int], late: Seconds) -> None:
        """Add steps in which these ranks took part, with their `late` seconds."""
        for column, rank in enumerate(ranks):
            self._sums[rank] = self._sums.get(rank, 0.0) + late[:, column].sum(axis=0)
            self._steps[rank] = self._steps.get(rank, 0) + len(steps)

        # A long flush may have more steps than are remembered.
        last_steps = slice(max(len(steps) - self._last, 0), None)
        for step, row in zip(steps[last_steps], late[last_steps], strict=True):
            self._recent[step] = [
                RankLateness(ranks[column], _name_causes(row[column]))
                for column in np.flatnonzero(row.sum(axis=1) > 0).tolist()
            ]
        for step in sorted(self._recent)[: -self._last]:
            del self._recent[step]

    def mean_lateness(self) -> list[dict[str, float]]:
        """Mean seconds by which each rank was late in a step, by cause, in the order of ranks."""
        return [_name_causes(self._sums[rank] / self._steps[rank]) for rank in sorted(self._sums)]

    def late_ranks_of(self, step: int) -> list[RankLateness]:
        """Late ranks of one of the last steps; empty for an older step."""
        return self._recent.get(step, [])

    def recent_late_ranks(self) -> dict[int, list[RankLateness]]:
        """Late ranks of each of the last steps, by step."""
        return dict(self._recent)


def stack_records(records: Sequence[Mapping[int, LogRecord]], ranks: Sequence[int]) -> Seconds:
    """Stack the records of steps, each by rank, into the seconds for `compute_lateness`."""
    rows = [
        [[*(step[rank].seconds or ()), *(step[rank].causes or ())] for rank in ranks]
        for step in records
    ]
    table = np.array(rows, dtype=np.float64).reshape(len(records), len(ranks), -1)
    compute, data, measured = (
        table[:, :, STEP_PARTS.index("compute")],
        table[:, :, STEP_PARTS.index("data")],
        table[:, :, len(STEP_PARTS) :] * 1e-6,
    )
    # Compute is the remainder, at least 0: clocks of the causes aren't exact.
    rest = np.maximum(compute + data - measured.sum(axis=2), 0.0)
    return np.concatenate([rest[:, :, None], measured], axis=2)
