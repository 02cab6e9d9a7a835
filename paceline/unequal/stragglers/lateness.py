"""How late each worker is in each step, and why.

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

    The values of `by_cause` add up to all of them.
    """

    rank: int
    by_cause: dict[str, float]

    @property
    def seconds(self) -> float:
        """Seconds for all causes."""
        return sum(self.by_cause.values())

    @property
    def cause(self) -> str:
        """The cause that took most, in words."""
        return WORDS[find_main_cause(self.by_cause)]


def find_main_cause(by_cause: Mapping[str, float]) -> str:
    """Return the cause that took most."""
    return max(by_cause, key=by_cause.__getitem__)


def compute_lateness(work: Seconds) -> Seconds:
    """Lateness of each rank in each step, by cause.

    The axes of `work` are steps, ranks and CAUSES, in seconds of own work. A rank is late by its
    time above the lower median of all ranks, so at least half of them never are. The time is
    divided among causes by their excess over the usual. If processors are crowded for all, a rank
    with more work loses more time to other programs: the amount that is usual for its work counts
    as work.
    """
    work = _even_out_stolen(work)
    ranks = work.shape[1]
    middle = (ranks - 1) // 2
    own = work.sum(axis=2)
    late = np.maximum(own - np.partition(own, middle, axis=1)[:, middle : middle + 1], 0.0)
    more = np.maximum(work - np.partition(work, middle, axis=1)[:, middle : middle + 1], 0.0)
    whole = more.sum(axis=2)
    found: Seconds = (
        more * np.divide(late, whole, out=np.zeros_like(late), where=whole > 0)[:, :, None]
    )
    return found


def _even_out_stolen(work: Seconds) -> Seconds:
    """Return the same seconds, but count as work what of a stolen processor is usual for so much
    of it.
    """
    middle, stolen = (work.shape[1] - 1) // 2, CAUSES.index("stolen")
    busy = work[:, :, :stolen].sum(axis=2)
    # of each rank in all steps: a single one is mostly chance
    mine, lost = busy.sum(axis=0), work[:, :, stolen].sum(axis=0)
    usual = np.partition(np.divide(lost, mine, out=np.zeros_like(mine), where=mine > 0), middle)[
        middle
    ]
    moved = np.minimum(
        np.divide(work[:, :, stolen], busy, out=np.zeros_like(busy), where=busy > 0), usual
    )
    found = work.copy()
    found[:, :, :stolen] *= 1 + moved[:, :, None]
    found[:, :, stolen] -= moved * busy
    return found


def find_latest_rank(late: Seconds, ranks: Sequence[int]) -> RankLateness:
    """Return the rank that was latest in the mean of these steps."""
    means = late.mean(axis=0)
    at = int(means.sum(axis=1).argmax())
    return RankLateness(ranks[at], _name_causes(means[at]))


def _name_causes(seconds: Seconds) -> dict[str, float]:
    return {cause: float(value) for cause, value in zip(CAUSES, seconds, strict=True)}


class LatenessTotals:
    """How late ranks were in all steps, and in each of the last ones."""

    def __init__(self, last: int) -> None:
        self._last = last
        self._sums: dict[int, Seconds] = {}
        self._steps: dict[int, int] = {}
        self._recent: dict[int, list[RankLateness]] = {}  # by step

    def add_steps(self, steps: Sequence[int], ranks: Sequence[int], late: Seconds) -> None:
        """Add steps in which these ranks took part."""
        for at, rank in enumerate(ranks):
            self._sums[rank] = self._sums.get(rank, 0.0) + late[:, at].sum(axis=0)
            self._steps[rank] = self._steps.get(rank, 0) + len(steps)
        kept = slice(max(len(steps) - self._last, 0), None)
        for step, row in zip(steps[kept], late[kept], strict=True):
            self._recent[step] = [
                RankLateness(ranks[at], _name_causes(row[at]))
                for at in np.flatnonzero(row.sum(axis=1) > 0).tolist()
            ]
        for step in sorted(self._recent)[: -self._last]:
            del self._recent[step]

    def mean_lateness(self) -> list[dict[str, float]]:
        """Return the mean seconds of a step by which each rank was late, by cause, in the order
        of ranks.
        """
        return [_name_causes(self._sums[rank] / self._steps[rank]) for rank in sorted(self._sums)]

    def late_ranks_of(self, step: int) -> list[RankLateness]:
        """Late ranks of one of the last steps."""
        return self._recent.get(step, [])

    def recent_late_ranks(self) -> dict[int, list[RankLateness]]:
        """Late ranks of each of the last steps."""
        return dict(self._recent)


def stack_records(records: Sequence[Mapping[int, LogRecord]], ranks: Sequence[int]) -> Seconds:
    """Return the work of steps as `lateness` takes it, by the records of each step by rank."""
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
    rest = np.maximum(compute + data - measured.sum(axis=2), 0.0)
    return np.concatenate([rest[:, :, None], measured], axis=2)
