"""Which gradients make a step together, if a worker may be late.

With backup workers the first to arrive make a step, and what comes later is dropped
(`FirstArrivals`). Within a bound of staleness a late gradient is in a later step (`PartialSteps`):

    worker 0   turn | turn | turn | turn |          comes to a step, and goes on once it is made
    worker 1   turn | turn | turn | turn |
    worker 2   turn | slow turn - turn - turn       late: the second step is made without it, its
                                                    gradient is in the third; it goes on
    step            1      2      3      4          at once, its next one is in the fourth

A worker is late once its turn has taken longer than turns do in this run: their median, and some
more (`leave`). A step is made by those that have come once all others are late; a late one is
waited for only after it has come, to whichever step is open then (after the partial collectives of
Li et al. 2020, "Taming unbalanced training workloads in deep learning with partial collective
operations"). It goes on at once then, out of phase with the others (`part`), until it comes as the
others do. So nothing that was pushed is lost, each step has a gradient of nearly all workers, and
where none is late it is that of lockstep.

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

SPANS = 4  # turns of each worker whose times are remembered
# of a median turn, of it, and of the median distance from it: what a turn may take longer
LEAST, MOST, SPREAD = 0.05, 0.5, 4.0
TOGETHER = 2.0  # times as long, when all are slow at once
DECISIONS = 8  # of the last steps with backup workers that are remembered
# of a median turn: for so long a late worker waits for the others, to be in phase again
SHORT = 0.25


class StepMade(NamedTuple):
    """A step that was made: its number, and what each of its workers said."""

    number: int
    came: dict[int, Any]
    # of those, the ones that wait for it: it is theirs to have it taken
    takers: frozenset[int] = frozenset()


class OpenStep(NamedTuple):
    """A step that is open, for whose end a late worker doesn't wait: how many were made before."""

    after: int


@dataclass
class StepDecision:
    """The workers that make a step, with backup workers: the first that came, in the order of
    their numbers.
    """

    # by worker, in the order in which they came: what it said
    came: dict[int, Any] = field(default_factory=dict)
    workers: list[int] = field(default_factory=list)  # once it is decided


class FirstArrivals:
    """The steps of one optimizer with backup workers: the first to arrive make a step, and others
    are too late for it.

    Workers are known by their numbers. `decided`: the last step that was decided.
    """

    def __init__(self, optimizer: int) -> None:
        self.decided = 0
        self._optimizer = optimizer
        self._steps: dict[int, StepDecision] = {}  # the last ones, by number

    def came(self, step: int) -> Collection[int]:
        """Return the workers that have come to a step."""
        return self._steps[step].came if step in self._steps else ()

    def arrive(
        self, worker: int, step: int, said: Any, running: Collection[int], enough: int
    ) -> StepDecision | bool | None:
        """Note that a worker has pushed all of its step.

        The decision with it; False: it is too late; None: not decided yet.

        A step is decided once `enough` workers have come, or all that are `running`.
        """
        if step <= self.decided:
            known = self._steps.get(step, StepDecision())
            return known if worker in known.workers else False
        if step != self.decided + 1:
            raise Mismatch(
                f"step {step} of optimizer {self._optimizer} can't come after step {self.decided}"
            )
        decision = self._steps.setdefault(step, StepDecision())
        decision.came.setdefault(worker, said)
        if len(decision.came) < enough and not decision.came.keys() >= {*running}:
            return None
        decision.workers = sorted(decision.came)
        self.decided = step
        self._steps.pop(step - DECISIONS, None)  # a worker that is so late knows it by the number
        return decision

    def lose(self, living: Set[int]) -> list[int]:
        """Go on with the living alone; return steps that are decided, and that none of them
        makes.
        """
        for decision in self._steps.values():
            if not decision.workers:
                decision.came = {
                    worker: said for worker, said in decision.came.items() if worker in living
                }
        return [
            step
            for step, decision in self._steps.items()
            if decision.workers and living.isdisjoint(decision.workers)
        ]


class PartialSteps:
    """The steps of one optimizer.

    Workers are known by their numbers; times are in seconds, of any clock.
    """

    def __init__(self, began: Mapping[int, float] | None = None) -> None:
        self.steps = 0  # that were made
        self.came: dict[int, Any] = {}  # what each worker of the next step has said
        self.takers: set[int] = set()  # of those, the ones that wait for it
        self.due = math.inf  # when to look again, though nothing has come
        self.sizes: Counter[int] = Counter()  # how many steps were made by so many workers
        # of how many gradients so many other steps were made during their turns
        self.ages: Counter[int] = Counter()
        # by worker: how often it had come, and what came of it
        self._made: dict[int, tuple[int, StepMade]] = {}
        self._began = dict(began or {})  # by worker: when its turn did
        # by worker: the steps that were made before that
        self._seen = dict.fromkeys(self._began, 0)
        self._late: set[int] = set()
        # workers that have come late to the open step, and have gone on
        self._apart: set[int] = set()
        # by worker that has come: the steps that were made before its turn
        self._from: dict[int, int] = {}
        self._spans: deque[float] = deque()  # seconds that turns took
        self._prompt: list[float] = []  # of workers that have come on time to the open step

    def begin(self, worker: int, now: float) -> None:
        """Note that a worker begins a turn."""
        self._began[worker], self._seen[worker] = now, self.steps
        if worker not in self._apart:
            self._late.discard(worker)

    def rest(self) -> None:
        """Note that an epoch begins: its first turns take an unknown time, as readers start with
        them.
        """
        self._began.clear()
        self._late.clear()
        self._seen = dict.fromkeys(self._seen, self.steps)

    def lose(self, living: Set[int]) -> list[int]:
        """Go on with the living alone; return steps that were made, as far as is decided, and
        that none of them makes.
        """
        self.came = {worker: said for worker, said in self.came.items() if worker in living}
        self._late, self._apart, self.takers = (
            self._late & living,
            self._apart & living,
            self.takers & living,
        )
        self._began = {worker: began for worker, began in self._began.items() if worker in living}
        self._seen = {worker: steps for worker, steps in self._seen.items() if worker in living}
        return sorted(
            {made.number for _, made in self._made.values() if living.isdisjoint(made.came)}
        )

    def come(self, worker: int, number: int, said: Any, now: float) -> StepMade | None:
        """Note that a worker has pushed all of gradient `number`, from 1 on; return its step,
        once that has been made.
        """
        before, made = self._made.get(worker, (0, None))
        if made is not None and number == before:
            return made
        if number != before + 1:
            raise Mismatch(
                f"gradient {number} of worker {worker} can't come after its gradient {before}"
            )
        if worker not in self.came:
            self.came[worker], self._from[worker] = said, self._seen.get(worker, 0)
            if worker in self._began:
                self._clock(now - self._began[worker], late=worker in self._late)
        return None

    def part(self, worker: int, absent: Collection[int], now: float) -> bool:
        """Whether a worker that has come goes on at once: it is late, no other waits yet, and
        others are on time, though not soon.

        Otherwise it waits, now or when it asks again.
        """
        on_time = [other for other in absent if other not in self._late]
        first = worker not in self._apart and worker not in self.takers
        if first and worker in self._late and on_time and not self.takers:
            begun = [self._began[other] for other in on_time if other in self._began]
            median = statistics.median_low(self._spans)
            if len(begun) < len(on_time) or max(begun) + (1 - SHORT) * median > now:
                self._apart.add(worker)
                return True
        self.takers.add(worker)
        return False

    def _clock(self, span: float, *, late: bool) -> None:
        self._spans.append(span)
        while len(self._spans) > SPANS * len(self._seen):
            self._spans.popleft()
        if not late:
            self._prompt.append(span)

    def leave(self, absent: int) -> float:
        """Seconds that a turn may take before it is late, if this number of workers is absent.

        The usual limit is the median turn plus `SPREAD` times the median distance from it, within
        bounds. All workers may be slow at once, when another program has the processors, and then
        none is late. So the limit grows with the turn of the worker that completes the first half
        of those on time: in proportion to the median, up to `TOGETHER` times. It is also longer
        than the first worker's turn.
        """
        median = statistics.median_low(self._spans)
        spread = statistics.median_low(abs(span - median) for span in self._spans)
        usual = median + min(max(SPREAD * spread, LEAST * median), MOST * median)
        came, half = sorted(self._prompt), max((len(self._prompt) + absent) // 2, 1)
        pace = came[half - 1] / median if half <= len(came) else TOGETHER
        first = came[0] * (1 + LEAST) if came else 0.0
        return max(usual * min(max(pace, 1.0), TOGETHER), first)

    def awaited(self, absent: Collection[int], now: float) -> bool:
        """Whether one of the absent may still be on time.

        Those that are not count as late from now on.
        """
        self.due = math.inf
        on_time = [worker for worker in absent if worker not in self._late]
        if not on_time:
            return False
        if len(self._spans) < len(absent) + len(self.came) or any(
            worker not in self._began for worker in on_time
        ):
            return True  # it isn't known yet how long turns take
        last = max(self._began[worker] for worker in on_time) + self.leave(len(on_time))
        if last > now:
            self.due = last
        return last > now

    def make(self, absent: Collection[int]) -> StepMade:
        """Make the next step with the workers that have come; the absent are late."""
        self.steps += 1
        made = StepMade(
            self.steps,
            {worker: self.came[worker] for worker in sorted(self.came)},
            frozenset(self.takers),
        )
        self.sizes[len(made.came)] += 1
        for worker in made.came:
            self.ages[self.steps - 1 - self._from[worker]] += 1
            self._made[worker] = (self._made[worker][0] if worker in self._made else 0) + 1, made
        self._late = (self._late - (self.came.keys() - self._apart)) | {*absent}
        self.came, self._prompt, self.due = {}, [], math.inf
        self._apart, self.takers = set(), set()
        return made
