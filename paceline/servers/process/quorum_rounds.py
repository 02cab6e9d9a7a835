"""Rounds of local SGD that don't wait for everybody: a quorum closes them, after a grace window.

    worker 0   steps, change |            new values | steps ...
    worker 1   steps ..... change |       new values | steps ...
    worker 2   steps ............................... change |          waits for the next round
    round            quorum (2 of 3) ^-- grace --^ closes

A round takes the mean change of the workers that have come, weighted by their samples. A late
worker's change is in the next round, relative to the values that the worker began with. So each
change is in one round, and none is lost (decoupled DiLoCo, arXiv 2604.21428).

Nothing here waits or sends. One process keeps the rounds, so all workers get the same decision.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.errors import Mismatch
from paceline.sync.localsgd.outer import Outer


@dataclass(frozen=True)
class RoundChange:
    """A worker's change since its last round.

    Attributes:
        number: Count of the worker's contributions, from 1 on.
        weight: Samples in it, in global batches.
        changes: The change of each tensor.
        final: The worker makes no more steps until all workers have come together.
    """

    number: int
    weight: float
    changes: Sequence[Tensor]
    final: bool


class QuorumRounds:
    """The values of all rounds, the state of the outer optimizer, and who has come to a round.

    Invariants: `_waiting` has the contributions that are in no round yet, one at most of each
    worker. `_answered` has the number of each worker's last contribution that is in a round, and
    `_started` the round after which the worker began its present steps.

    Args:
        values: The first values, which are changed in place.
        memories: State of the outer optimizer for each tensor, or None.
        outer: The outer optimizer.
        quorum: Part of the running workers that a round needs, above 0, at most 1.
        grace_seconds: Seconds for which a round waits for others once it has its quorum.
    """

    def __init__(
        self,
        values: Sequence[Tensor],
        memories: Sequence[Tensor | None],
        outer: Outer,
        *,
        quorum: float,
        grace_seconds: float,
    ) -> None:
        self.values, self.memories = list(values), list(memories)
        self.count = 0  # rounds that have closed
        self._outer, self._quorum, self._grace_seconds = outer, quorum, grace_seconds
        self._waiting: dict[int, RoundChange] = {}
        self._answered: dict[int, int] = {}
        self._started: dict[int, int] = {}
        self._quorum_since: float | None = None  # when the open round got its quorum
        self._workers_by_round: Counter[int] = Counter()  # rounds, by their number of workers
        self._late = 0  # contributions of workers that had missed a round or more

    def admit_worker(self, worker: int) -> None:
        """Note that a worker has joined, and begins with the present values."""
        self._started[worker] = self.count

    def submit(self, worker: int, contribution: RoundChange) -> None:
        """Add a worker's contribution to the open round. A repeated one counts once.

        Raises:
            Mismatch: The contribution has other shapes, or its number is not the next one.
        """
        if contribution.number <= self._answered.get(worker, 0):
            return
        if contribution.number != self._answered.get(worker, 0) + 1:
            raise Mismatch(f"worker {worker} skips a round: {contribution.number}")
        shapes = [change.shape for change in contribution.changes]
        if shapes != [value.shape for value in self.values]:
            raise Mismatch(f"worker {worker} sends changes of another model")
        if not contribution.weight >= 0 or math.isinf(contribution.weight):
            raise Mismatch(f"worker {worker} sends a change of weight {contribution.weight}")
        self._waiting[worker] = contribution

    def has_answer(self, worker: int, number: int) -> bool:
        """Whether this contribution of a worker is in a round that has closed."""
        return number <= self._answered.get(worker, 0)

    def close_if_due(self, running: Set[int], members: Set[int], now: float) -> list[int]:
        """Close the open round if it is due.

        Args:
            running: Workers that have steps to make, and are alive.
            members: All workers that are alive. A final round waits for all of them.
            now: Time in seconds, of any clock.

        Returns:
            The workers whose changes are in the round; none if it stays open.
        """
        if not self._waiting:
            return []
        if any(contribution.final for contribution in self._waiting.values()):
            is_due = self._waiting.keys() >= members
        else:
            expected = running | self._waiting.keys()
            is_due = self._waiting.keys() >= expected or self._is_grace_over(len(expected), now)
        return self._close_round() if is_due else []

    def _is_grace_over(self, expected: int, now: float) -> bool:
        """Whether the round has had its quorum for as long as the grace window."""
        # 0.7 * 10 is a little more than 7 in floating point.
        if len(self._waiting) < math.ceil(self._quorum * expected - 1e-9):
            self._quorum_since = None
            return False
        if self._quorum_since is None:
            self._quorum_since = now
        return now >= self._quorum_since + self._grace_seconds

    @property
    def next_check(self) -> float:
        """Time at which the grace window ends; inf without a quorum."""
        return math.inf if self._quorum_since is None else self._quorum_since + self._grace_seconds

    def list_absent(self, running: Iterable[int]) -> list[int]:
        """List the running workers that have not come to the open round."""
        return sorted(worker for worker in running if worker not in self._waiting)

    def _close_round(self) -> list[int]:
        """Move the values by the mean change, and answer the workers in the round."""
        # In the order of workers, so that the sum doesn't depend on who was first.
        workers = sorted(self._waiting)
        contributions = [self._waiting[worker] for worker in workers]
        total = math.fsum(contribution.weight for contribution in contributions)
        if total:
            self._move_values(contributions, total)
            self._late += sum(self._started.get(worker, 0) < self.count for worker in workers)
            self.count += 1
            self._workers_by_round[len(workers)] += 1
        for worker, contribution in zip(workers, contributions, strict=True):
            self._answered[worker] = contribution.number
        self._waiting.clear()
        self._quorum_since = None
        for worker in workers:
            self._started[worker] = self.count
        return workers

    def _move_values(self, contributions: Sequence[RoundChange], total: float) -> None:
        for index, (value, memory) in enumerate(zip(self.values, self.memories, strict=True)):
            mean = torch.zeros_like(value)
            for contribution in contributions:
                mean.add_(contribution.changes[index], alpha=contribution.weight / total)
            self._outer.move(value, mean, memory)

    def remove_lost_workers(self, members: Set[int]) -> None:
        """Drop the contributions of lost workers that are in no round: their samples come again."""
        for worker in self._waiting.keys() - members:
            del self._waiting[worker]

    def summarize_rounds(self) -> dict[str, Any]:
        """Statistics for the summary: rounds, rounds by their number of workers, late changes."""
        by_workers = {str(number): n for number, n in sorted(self._workers_by_round.items())}
        return {"count": self.count, "by_workers": by_workers, "late": self._late}
