"""Decides which gradients make a step together, if a worker may be late.

There are two ways. With backup workers, the first gradients to arrive make a step, and later ones
are dropped (`FirstArrivals`). Within a staleness bound, a late gradient is part of a later step
(`PartialSteps`):

    worker 0   turn | turn | turn | turn |          arrives at a step, goes on once it is made
    worker 1   turn | turn | turn | turn |
    worker 2   turn | slow turn - turn - turn       late: step 2 is made without it, and its
                                                    gradient is in step 3. It goes on at once,
    step            1      2      3      4          and its next gradient is in step 4

A worker is late once its turn has taken longer than turns usually take in this run: the median and
a margin (`compute_time_limit`). A step is made by the workers that have arrived, as soon as all
other workers are late. A late worker is waited for again only after it has arrived at whichever
step is open then. This follows the partial collectives of Li et al. 2020, "Taming unbalanced
training workloads in deep learning with partial collective operations".

A late worker that arrives goes on at once, out of phase with the others (`release_if_late`), until
it arrives at the same time as they do. So no gradient is lost, each step has a gradient of nearly
every worker, and a step without late workers is the same as in lockstep.

Nothing here waits or sends, and the time is an argument.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.errors import Mismatch

# Number of turns per worker whose times are remembered.
REMEMBERED_TURNS = 4
# The margin that a turn may take beyond the median turn: `SPREAD_FACTOR` times the median distance
# from that, but at least `MIN_MARGIN` and at most `MAX_MARGIN` times the median turn.
MIN_MARGIN, MAX_MARGIN, SPREAD_FACTOR = 0.05, 0.5, 4.0
# Factor by which the limit may grow when all workers are slow at once.
MAX_COMMON_SLOWDOWN = 2.0
# Number of past steps with backup workers that are remembered.
REMEMBERED_DECISIONS = 8
# Part of a median turn that a late worker waits for the others, to get back in phase with them.
REJOIN_WAIT = 0.25


class StepMade(NamedTuple):
    """A step that was made: its number, and the contribution of each of its workers."""

    number: int
    contributions: dict[int, Any]
    # Workers in `contributions` that wait for this step. They ask the servers to take it.
    waiting_workers: frozenset[int] = frozenset()


class OpenStep(NamedTuple):
    """An open step that a late worker doesn't wait for. `steps_before`: steps made before it."""

    steps_before: int


@dataclass
class StepDecision:
    """The workers that make a step with backup workers: the first to arrive, in rising order."""

    # By worker, in the order of arrival.
    contributions: dict[int, Any] = field(default_factory=dict)
    workers: list[int] = field(default_factory=list)  # empty until the step is decided


class FirstArrivals:
    """The steps of one optimizer with backup workers.

    The first workers to arrive at a step make it, and later workers are too late for it.
    `last_decided` is the number of the last step that was decided.
    """

    def __init__(self, optimizer: int) -> None:
        self.last_decided = 0
        self._optimizer = optimizer
        # The last `REMEMBERED_DECISIONS` steps, by number.
        self._recent_decisions: dict[int, StepDecision] = {}

    def get_arrived_workers(self, step: int) -> Collection[int]:
        """Get the workers that have arrived at a step."""
        return self._recent_decisions[step].contributions if step in self._recent_decisions else ()

    def record_arrival(
        self, worker: int, step: int, contribution: Any, running: Collection[int], enough: int
    ) -> StepDecision | bool | None:
        """Record that a worker has pushed its whole gradient for a step.

        The step is decided once `enough` workers, or all `running` ones, have arrived.

        Returns:
            The decision if this worker takes part in the step; False if the worker is too late;
            None if the step isn't decided yet.
        """
        if step <= self.last_decided:
            decision = self._recent_decisions.get(step, StepDecision())
            return decision if worker in decision.workers else False
        if step != self.last_decided + 1:
            raise Mismatch(
                f"step {step} of optimizer {self._optimizer} can't come after step "
                f"{self.last_decided}"
            )
        decision = self._recent_decisions.setdefault(step, StepDecision())
        decision.contributions.setdefault(worker, contribution)
        if len(decision.contributions) < enough and not decision.contributions.keys() >= {*running}:
            return None
        decision.workers = sorted(decision.contributions)
        self.last_decided = step
        # A worker that is even later learns from `last_decided` that it is too late.
        self._recent_decisions.pop(step - REMEMBERED_DECISIONS, None)
        return decision

    def remove_lost_workers(self, survivors: Set[int]) -> list[int]:
        """Go on with the survivors alone.

        Returns:
            The steps that are decided, but that none of the survivors takes part in.
        """
        for decision in self._recent_decisions.values():
            if not decision.workers:
                decision.contributions = {
                    worker: contribution
                    for worker, contribution in decision.contributions.items()
                    if worker in survivors
                }
        return [
            step
            for step, decision in self._recent_decisions.items()
            if decision.workers and survivors.isdisjoint(decision.workers)
        ]


class PartialSteps:
    """The steps of one optimizer within a staleness bound.

    Times are in seconds, of any clock. Invariants:

    - `contributions` has the workers that arrived at the open step. Each of them either waits
      for the step (`waiting_workers`) or has gone on without waiting (`_released_workers`), or is
      about to do one of the two. No worker does both.
    - A worker is in `_late_workers` from the step that was made without it until it has waited for
      a step, or begins a turn while it isn't released.
    - A worker without an entry in `_turn_starts` has a turn of unknown length: a step waits for it.
    """

    def __init__(self, began: Mapping[int, float] | None = None) -> None:
        self.steps_made = 0
        self.contributions: dict[int, Any] = {}
        self.waiting_workers: set[int] = set()
        # Time of the next look at the open step if no message comes before.
        self.next_check = math.inf
        # Statistics: number of steps by the number of workers that made them, and number of
        # gradients by the number of other steps that were made during their turns.
        self.steps_by_worker_count: Counter[int] = Counter()
        self.gradients_by_age: Counter[int] = Counter()
        # By worker: number of its gradients that are in a step, and the last such step.
        self._last_steps: dict[int, tuple[int, StepMade]] = {}
        # By worker: start of its turn, and number of steps made before it.
        self._turn_starts = dict(began or {})
        self._steps_before_turn = dict.fromkeys(self._turn_starts, 0)
        self._late_workers: set[int] = set()
        self._released_workers: set[int] = set()
        # By worker that has arrived: number of steps made before the turn of its gradient.
        self._steps_before_gradient: dict[int, int] = {}
        # Seconds of the last turns of all workers, and of those that are on time in the open step.
        self._turn_seconds: deque[float] = deque()
        self._on_time_seconds: list[float] = []

    def begin_turn(self, worker: int, now: float) -> None:
        """Record that a worker begins a turn."""
        self._turn_starts[worker], self._steps_before_turn[worker] = now, self.steps_made
        if worker not in self._released_workers:
            self._late_workers.discard(worker)

    def begin_epoch(self) -> None:
        """Begin an epoch.

        Its first turns take an unknown time, because data readers start with them.
        """
        self._turn_starts.clear()
        self._late_workers.clear()
        self._steps_before_turn = dict.fromkeys(self._steps_before_turn, self.steps_made)

    def remove_lost_workers(self, survivors: Set[int]) -> list[int]:
        """Go on with the survivors alone.

        Returns:
            The steps that were made, as far as is decided, but have no gradient of a survivor.
        """
        self.contributions = {
            worker: contribution
            for worker, contribution in self.contributions.items()
            if worker in survivors
        }
        self._late_workers, self._released_workers, self.waiting_workers = (
            self._late_workers & survivors,
            self._released_workers & survivors,
            self.waiting_workers & survivors,
        )
        self._turn_starts = {
            worker: began for worker, began in self._turn_starts.items() if worker in survivors
        }
        self._steps_before_turn = {
            worker: steps
            for worker, steps in self._steps_before_turn.items()
            if worker in survivors
        }
        return sorted(
            {
                step.number
                for _, step in self._last_steps.values()
                if survivors.isdisjoint(step.contributions)
            }
        )

    def record_gradient(
        self, worker: int, number: int, contribution: Any, now: float
    ) -> StepMade | None:
        """Record that a worker has pushed its whole gradient `number`, counted from 1 on.

        Returns the step with that gradient if it has been made.
        """
        before, last_step = self._last_steps.get(worker, (0, None))
        if last_step is not None and number == before:
            return last_step
        if number != before + 1:
            raise Mismatch(
                f"gradient {number} of worker {worker} can't come after its gradient {before}"
            )
        if worker not in self.contributions:
            self.contributions[worker], self._steps_before_gradient[worker] = (
                contribution,
                self._steps_before_turn.get(worker, 0),
            )
            if worker in self._turn_starts:
                self._record_turn_time(
                    now - self._turn_starts[worker], late=worker in self._late_workers
                )
        return None

    def release_if_late(self, worker: int, absent: Collection[int], now: float) -> bool:
        """Whether a worker that has arrived goes on at once, without waiting for the step.

        It does if it is late, no other worker waits for the step yet, and the workers that are on
        time won't arrive soon. Otherwise it waits, now and whenever it asks again.
        """
        on_time = [other for other in absent if other not in self._late_workers]
        first = worker not in self._released_workers and worker not in self.waiting_workers
        if first and worker in self._late_workers and on_time and not self.waiting_workers:
            # If a worker on time is expected soon, this one waits: both are in phase again then.
            begun = [self._turn_starts[other] for other in on_time if other in self._turn_starts]
            median = statistics.median_low(self._turn_seconds)
            if len(begun) < len(on_time) or max(begun) + (1 - REJOIN_WAIT) * median > now:
                self._released_workers.add(worker)
                return True
        self.waiting_workers.add(worker)
        return False

    def _record_turn_time(self, span: float, *, late: bool) -> None:
        self._turn_seconds.append(span)
        while len(self._turn_seconds) > REMEMBERED_TURNS * len(self._steps_before_turn):
            self._turn_seconds.popleft()
        if not late:
            self._on_time_seconds.append(span)

    def compute_time_limit(self, absent: int) -> float:
        """Compute the seconds that a turn may take before it is late.

        The usual limit is the median turn plus `SPREAD_FACTOR` times the median distance from it,
        within bounds. All workers may be slow at once, when another program has the processors.
        None of them is late then. So the limit grows with the turn of the worker that completes the
        first half of the workers on time: in proportion to the median, up to
        `MAX_COMMON_SLOWDOWN` times. It is also longer than the shortest turn of this step.

        `absent` is the number of workers that are on time, but have not arrived yet.
        """
        median = statistics.median_low(self._turn_seconds)
        spread = statistics.median_low(abs(span - median) for span in self._turn_seconds)
        # Without the lower bound, equal turns would leave no margin; without the upper bound, a few
        # very slow turns would.
        usual = median + min(max(SPREAD_FACTOR * spread, MIN_MARGIN * median), MAX_MARGIN * median)
        # How slow this step is for all: the turn of the middle worker. If fewer than half of the
        # workers have arrived, the step may still be as slow as is allowed.
        spans, half = (
            sorted(self._on_time_seconds),
            max((len(self._on_time_seconds) + absent) // 2, 1),
        )
        pace = spans[half - 1] / median if half <= len(spans) else MAX_COMMON_SLOWDOWN
        shortest = spans[0] * (1 + MIN_MARGIN) if spans else 0.0
        return max(usual * min(max(pace, 1.0), MAX_COMMON_SLOWDOWN), shortest)

    def is_awaiting_workers(self, absent: Collection[int], now: float) -> bool:
        """Whether one of the absent workers may still be on time.

        If none may, the caller makes the step, and the absent workers count as late. Sets
        `next_check` to the time when the answer may change.
        """
        self.next_check = math.inf
        on_time = [worker for worker in absent if worker not in self._late_workers]
        if not on_time:
            return False
        # Without enough turns to compare with, or with a turn that began at an unknown time, no
        # worker counts as late.
        if len(self._turn_seconds) < len(absent) + len(self.contributions) or any(
            worker not in self._turn_starts for worker in on_time
        ):
            return True
        last = max(self._turn_starts[worker] for worker in on_time) + self.compute_time_limit(
            len(on_time)
        )
        if last > now:
            self.next_check = last
        return last > now

    def make_step(self, absent: Collection[int]) -> StepMade:
        """Make the next step with the workers that have arrived. The absent workers are late."""
        self.steps_made += 1
        step = StepMade(
            self.steps_made,
            {worker: self.contributions[worker] for worker in sorted(self.contributions)},
            frozenset(self.waiting_workers),
        )
        self.steps_by_worker_count[len(step.contributions)] += 1
        for worker in step.contributions:
            self.gradients_by_age[self.steps_made - 1 - self._steps_before_gradient[worker]] += 1
            self._last_steps[worker] = (
                (self._last_steps[worker][0] if worker in self._last_steps else 0) + 1,
                step,
            )
        # A worker that arrived and waits is in phase again. One that was released stays late.
        self._late_workers = (
            self._late_workers - (self.contributions.keys() - self._released_workers)
        ) | {*absent}
        self.contributions, self._on_time_seconds, self.next_check = {}, [], math.inf
        self._released_workers, self.waiting_workers = set(), set()
        return step
