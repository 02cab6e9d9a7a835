"""The scheduler of workers that are not in lockstep, on the first server: which worker may go on,
and with which samples.

    worker 0   take turn tick | take turn tick | take ...      clock 2
    worker 1   take turn ........ tick | take turn ...         clock 1    may be `bound` turns ahead
                                                               of the slowest, and waits then
    scheduler  deals each global batch of an epoch piece by piece, to workers that ask; knows whose
               pieces are under way

With backup workers the first to come to a step make it (`arrive`); a piece of a later one is
dropped. Within a bound, the workers on time make it, and a later one is in the next (`gather`), and
may go on before that is made.

Nothing here waits or sends: what can't be answered yet is None, and asked again.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paceline.errors import Mismatch
from paceline.servers.process.arrivals import (
    FirstArrivals,
    OpenStep,
    PartialSteps,
    StepDecision,
    StepMade,
)
from paceline.servers.process.spans import SampleSpan
from paceline.servers.process.staleness import WorkerClocks

SHOWN = 1000  # dropped pieces that are listed one by one
Part = tuple[int, int]  # of an epoch: its number, and that of the first batch in the part


@dataclass
class ScheduleTally:
    """Statistics of a scheduler, for the summary."""

    # how often a worker went on that was so many turns ahead of the slowest
    leads: Counter[int] = field(default_factory=Counter)
    dropped: int = 0  # gradients that came too late
    samples: int = 0  # of those
    # epoch and piece that were dropped for good, the first `SHOWN`
    pieces: list[tuple[int, SampleSpan]] = field(default_factory=list)

    def drop(self, epoch: int, piece: SampleSpan) -> None:
        """Count a piece that was dropped for good."""
        self.dropped += 1
        self.samples += piece.stop - piece.start
        if len(self.pieces) < SHOWN:
            self.pieces.append((epoch, piece))

    def facts(self) -> dict[str, Any]:
        """Counts of dropped samples and gradients, for the summary."""
        pieces = [[epoch, *piece] for epoch, piece in self.pieces]
        return {"gradients": self.dropped, "samples": self.samples, "pieces": pieces}


class UndealtSamples:
    """The samples of a part of an epoch that are still to be dealt: pieces that are dealt again,
    then the global batches in order.

    `part`: the epoch, and the number of the first batch in it.
    """

    def __init__(self, part: Part | None = None, sizes: Sequence[int] = ()) -> None:
        self.part, self.sizes = part, sizes
        self.stopped = False  # nothing more is dealt in this epoch
        self._next = (0, 0)  # batch (from the first one on), and sample, that are dealt next
        self._todo = deque[SampleSpan]()

    @property
    def left(self) -> bool:
        """Whether there are any."""
        return bool(self._todo) or self._next[0] < len(self.sizes)

    def again(self, pieces: Iterable[SampleSpan]) -> None:
        """Deal these pieces again."""
        self._todo.extend(pieces)

    def cut(self, most: int) -> SampleSpan | None:
        """Take the next piece, of at most so many samples; None where nothing is left."""
        if self._todo:
            batch, start, stop = self._todo.popleft()
            if stop - start > most:
                self._todo.appendleft(SampleSpan(batch, start + most, stop))
            return SampleSpan(batch, start, min(start + most, stop))
        number, start = self._next
        if self.part is None or number == len(self.sizes):
            return None
        stop = min(start + most, self.sizes[number])
        self._next = (number, stop) if stop < self.sizes[number] else (number + 1, 0)
        return SampleSpan(self.part[1] + number, start, stop)


class NoteBox:
    """Notes of workers to the first worker, which are kept until it has them."""

    def __init__(self) -> None:
        self._notes: list[tuple[int, Tensor]] = []
        self._last: dict[int, int] = {}  # by worker: the number of its last note

    def post(self, worker: int, letter: Tensor, number: int = 0) -> None:
        """Keep a note, its `number` from 1 on; one that comes again is not kept twice."""
        if not number or number > self._last.get(worker, 0):
            self._notes.append((worker, letter))
            self._last[worker] = number

    def collect(self, had: int = 0) -> list[tuple[int, Tensor]]:
        """Return all notes that have come, but for the first `had`: those have arrived."""
        del self._notes[:had]
        return list(self._notes)


class SampleScheduler:
    """Deals the samples of one run, within the staleness bound (`staleness`).

    Workers are known by their numbers.
    """

    def __init__(self) -> None:
        self.tally = ScheduleTally()
        self._clocks = WorkerClocks()
        self.notes = NoteBox()
        self._samples = UndealtSamples()
        self._under_way: dict[int, list[SampleSpan]] = {}
        # by worker: pieces whose turns are over, and whose gradients are in no step yet
        self._carried: dict[int, list[SampleSpan]] = {}
        # by worker: the number of its last piece, and that
        self._given: dict[int, tuple[int, SampleSpan]] = {}
        self._lost: set[int] = set()
        self._active: set[int] = set()  # workers that have turns to take
        # of those, the ones that asked for pieces when there were none, and wait for what others
        # may drop
        self._parked: set[int] = set()
        self._arrivals: dict[int, FirstArrivals] = {}  # by optimizer
        self._gatherings: dict[int, PartialSteps] = {}  # by optimizer
        self._began: dict[int, float] = {}  # by worker: when its turn did
        # workers that have completed a turn, and may not begin the next
        self._held: set[int] = set()
        self._pausing = False  # no more pieces, until all have asked for some
        self._times = 0  # how often the part was gone on with, after all had stopped taking

    @property
    def clocks(self) -> dict[int, int]:
        """The turns that each worker has completed."""
        return self._clocks.of

    @property
    def _running(self) -> set[int]:
        return self._active - self._parked

    # ---- samples

    def begin(
        self, epoch: int, first: int, sizes: Sequence[int], workers: Iterable[int], times: int = 0
    ) -> None:
        """Deal these global batches, the first of which has the number `first` in its epoch.

        Called for all workers, when none has a turn.

        `times`: how often the part is gone on with, perhaps by other workers, after all had stopped
        taking (`pause`).
        """
        part, samples = (epoch, first), self._samples
        if samples.part == part and times == self._times:
            if list(sizes) != list(samples.sizes):
                raise Mismatch(f"workers deal different batches in epoch {epoch}")
            return
        left = [worker for worker in self._active if self._under_way.get(worker)]
        if left:
            raise Mismatch(
                f"epoch {epoch} can't begin: workers {left} are in the middle of another"
            )
        if not sizes or min(sizes) < 1:
            raise Mismatch("there is nothing to deal, or a batch without samples")
        if samples.part == part:
            samples.sizes = sizes
        else:
            self._samples = UndealtSamples(part, sizes)
        self._times, self._pausing = times, False
        self._active, self._parked = {*workers} - self._lost, set()
        self._under_way = {worker: [] for worker in self._active}
        self._carried.clear()
        self._began.clear()
        for gathering in self._gatherings.values():
            gathering.rest()
        latest = max(self.clocks.values(), default=0)
        # all are at the same place
        self._clocks = WorkerClocks(dict.fromkeys(self._active, latest))

    def take(self, worker: int, most: int, number: int = 0) -> SampleSpan | bool | None:
        """Take the next piece, of at most so many samples; False: there is none for this worker, or
        not now; None: there may be later.

        `number`: of the worker's pieces, from 1 on (0: not counted); one that it asks for again is
        given again. A worker that gets False goes on when all have come together if `paused`. One
        that hasn't any turns to take (`takes`) is done.
        """
        if worker not in self._under_way or most < 1:
            raise Mismatch(f"worker {worker} has no turns to take, or asks for {most} samples")
        last = self._given.get(worker)
        if last is not None and number == last[0] > 0:
            return last[1]
        if worker not in self._active:
            return False
        found = None if self._samples.stopped or self.paused else self._samples.cut(most)
        if found is not None:
            self._parked.discard(worker)
            self._under_way[worker].append(found)
            self._given[worker] = number, found
            return found
        if self._under_way[worker]:  # its own turns come first
            return False
        if not self._samples.stopped and any(self._under_way[other] for other in self._active):
            self._parked.add(worker)
            return None
        if self.paused:
            self._parked.add(worker)
            return False if self._parked >= self._active else None
        self.leave(worker)
        return False

    def pause(self) -> None:
        """Stop dealing, so that all end their turns and come together; unless some have ended
        the epoch already.
        """
        self._pausing = self._active == self.clocks.keys()

    @property
    def paused(self) -> bool:
        """Whether dealing has stopped, with something left for later."""
        return self._pausing and self._samples.left

    def lose(self, living: Set[int]) -> tuple[list[tuple[int, int]], int]:
        """Go on with the living alone, and deal again what others had under way.

        Returns the steps (optimizer, step) that were decided, and that none of the living makes;
        and how many samples nobody takes.
        """
        lost = self._under_way.keys() - living
        self._lost |= lost
        pieces = [
            piece
            for worker in sorted(lost)
            for piece in [*self._carried.pop(worker, ()), *self._under_way.pop(worker)]
        ]
        self._active, self._parked, self._held = (
            self._active & living,
            self._parked & living,
            self._held & living,
        )
        self._clocks.lose(living)
        if self._active:
            self._samples.again(pieces)
        nobodys = (
            0
            if self._active or self._samples.stopped
            else sum(piece.stop - piece.start for piece in pieces)
        )
        makers: list[tuple[int, FirstArrivals | PartialSteps]] = [
            *self._arrivals.items(),
            *self._gatherings.items(),
        ]
        return [
            (optimizer, step) for optimizer, steps in makers for step in steps.lose(living)
        ], nobodys

    def busy(self, worker: int) -> bool:
        """Whether the worker has turns of its own to take first."""
        return bool(self._under_way.get(worker))

    def takes(self, worker: int) -> bool:
        """Whether the worker has turns to take, or may have."""
        return worker in self._active

    def leave(self, worker: int) -> None:
        """Note that a worker begins no more turns in this epoch; no other waits for it."""
        self._pausing = False
        self._active.discard(worker)
        self._parked.discard(worker)

    def stop(self) -> None:
        """Deal no more pieces in this epoch."""
        self._samples.stopped = True

    # ---- clocks

    def tick(
        self, worker: int, clock: int, *, dropped: bool = False, carried: bool = False
    ) -> None:
        """Note that a worker has completed turn `clock`, of its oldest piece.

        `dropped`: its samples are in no step; `carried`: not yet, as no optimizer has stepped.
        """
        if not self._under_way.get(worker):
            raise Mismatch(f"worker {worker} has completed a turn that it hasn't begun")
        self._clocks.tick(worker, clock)
        self._held.add(worker)
        piece = self._under_way[worker].pop(0)
        self._carried[worker] = [*self._carried.get(worker, ()), piece] if carried else []
        if dropped:
            assert self._samples.part is not None
            self.tally.drop(self._samples.part[0], piece)

    @property
    def slowest(self) -> int:
        """The turns that every worker has completed which has turns to take now."""
        return self._clocks.slowest(self._running)

    def may(self, worker: int, bound: float) -> bool:
        """Whether a worker may begin its next turn: it takes none here, or is within the bound
        of staleness.
        """
        return worker not in self._active or self._clocks.may(worker, self._running, bound)

    def went(self, worker: int, now: float = 0.0) -> None:
        """Note that the worker may go on, and knows it."""
        self._held.discard(worker)
        self.starts(worker, now)
        self.tally.leads[max(self._clocks.lead(worker, self._running), 0)] += 1

    def starts(self, worker: int, now: float, *, first: bool = False) -> None:
        """Note that a worker begins a turn now (seconds, of any clock).

        `first`: of an epoch; only the first one of all counts.
        """
        if first and self._gatherings:
            return
        self._began[worker] = now
        for gathering in self._gatherings.values():
            gathering.begin(worker, now)

    def behind(self, worker: int) -> list[tuple[int, int]]:
        """Return the workers that this one waits for, and the turns that those have completed."""
        return self._clocks.behind(worker, self._running)

    # ---- which workers make a step, with backup workers

    def arrive(
        self, worker: int, optimizer: int, step: int, said: Any, backups: int
    ) -> StepDecision | bool | None:
        """Note that a worker has pushed all of its step.

        The decision with it; False: it is too late; None: not decided yet.

        A step is decided once all but `backups` of the workers that have turns to take have come.
        """
        self._clocks.check(worker)
        arrivals, running = (
            self._arrivals.setdefault(optimizer, FirstArrivals(optimizer)),
            self._running,
        )
        return arrivals.arrive(
            worker, step, said, running, max(min(len(self.clocks) - backups, len(running)), 1)
        )

    def decided(self, optimizer: int) -> int:
        """Return the last step that was decided."""
        return self._arrivals[optimizer].decided if optimizer in self._arrivals else 0

    def absent(self, optimizer: int, step: int) -> list[tuple[int, int]]:
        """Return the workers that have not come to a step yet, and the turns that those have
        completed.
        """
        gathering, arrivals = (
            self._gatherings.get(optimizer),
            self._arrivals.get(optimizer, FirstArrivals(optimizer)),
        )
        came = arrivals.came(step) if gathering is None else gathering.came
        return [
            (worker, self.clocks[worker]) for worker in sorted(self._running) if worker not in came
        ]

    # ---- which workers make a step, within a bound

    def gather(
        self,
        worker: int,
        optimizer: int,
        number: int,
        said: Any,
        *,
        bound: float,
        now: float,
        part: bool = False,
    ) -> StepMade | OpenStep | None:
        """Note that a worker has pushed all of gradient `number`: the step that it is in; None: not
        made yet. `now`: in seconds.

        A step is made by all that have turns to take; without the late ones (`PartialSteps`),
        unless none of the others could go on then. `part`: a late worker may go on while it is
        open, and learns that. It asks again before it pushes more.
        """
        self._clocks.check(worker)
        gathering = self._gatherings.setdefault(optimizer, PartialSteps(self._began))
        made = gathering.come(worker, number, said, now)
        if made is not None:
            return made
        elsewhere = {
            other
            for one in self._gatherings.values()
            if one is not gathering
            for other in one.takers
        }
        # the others wait themselves
        absent = self._running - self._held - elsewhere - gathering.came.keys()
        if gathering.part(worker, absent if part else (), now):
            self._clocks.part(optimizer, worker)
            return OpenStep(gathering.steps)
        gathering.due = math.inf
        if not self._clocks.stuck(gathering.came, self._running, bound) and not gathering.awaited(
            absent, now
        ):
            made = gathering.make(absent)
            self._clocks.join(optimizer, made.came)
        return made

    def made(self) -> list[list[int]]:
        """List the steps that were made of each optimizer within a bound: its number, and theirs.

        They may be about to be taken.
        """
        return [[optimizer, gathering.steps] for optimizer, gathering in self._gatherings.items()]

    @property
    def due(self) -> float:
        """When to ask again for delayed answers, though no message has come."""
        return min((gathering.due for gathering in self._gatherings.values()), default=math.inf)

    def facts(self) -> dict[str, Any]:
        """Return the statistics for the summary."""
        gatherings = self._gatherings.values()
        return {
            "staleness": _counted([self.tally.leads]),
            "steps_by_workers": _counted(gathering.sizes for gathering in gatherings),
            "steps_late": _counted(gathering.ages for gathering in gatherings),
            "dropped": self.tally.facts(),
        }


def _counted(found: Iterable[Counter[int]]) -> dict[str, int]:
    """Add these up, in the form of the summary."""
    return {str(number): count for number, count in sorted(sum(found, Counter[int]()).items())}
