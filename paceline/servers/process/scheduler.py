"""The scheduler of workers that are not in lockstep.

It runs on the first server, and decides which worker may go on, and with which samples:

    worker 0   take .. complete | take .. complete | take ..  clock 2
    worker 1   take .......... complete | take ..           clock 1    may be `bound` turns ahead
                                                               of the slowest, and waits then
    scheduler  deals each global batch of an epoch piece by piece to the workers that ask, and
               remembers which worker works on which piece

With backup workers, the first workers to arrive at a step make it (`record_arrival`), and the piece
of a later worker is dropped. Within a staleness bound, the workers on time make a step; a later
worker takes part in the next step (`record_gradient`), and may go on before that is made.

Nothing here waits or sends. If a question can't be answered yet, the answer is None, and the caller
asks again.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paceline.errors import Mismatch
from paceline.servers.process.late_gradients import (
    FirstArrivals,
    OpenStep,
    PartialSteps,
    StepDecision,
    StepMade,
)
from paceline.servers.process.sample_spans import SampleSpan
from paceline.servers.process.worker_clocks import WorkerClocks

# Number of dropped pieces that are listed one by one.
MAX_LISTED_PIECES = 1000
# A part of an epoch: number of the epoch, and number of the first batch in the part.
EpochPart = tuple[int, int]


@dataclass
class ScheduleTally:
    """Statistics of a scheduler, for the summary."""

    # Number of times that a worker went on, by its lead over the slowest worker, in turns.
    leads: Counter[int] = field(default_factory=Counter)
    dropped_gradients: int = 0  # gradients that were too late
    dropped_samples: int = 0  # samples of these gradients
    # Epoch and piece of the first `MAX_LISTED_PIECES` dropped gradients.
    dropped_pieces: list[tuple[int, SampleSpan]] = field(default_factory=list)

    def count_dropped_piece(self, epoch: int, piece: SampleSpan) -> None:
        """Count a piece that was dropped for good."""
        self.dropped_gradients += 1
        self.dropped_samples += piece.stop - piece.start
        if len(self.dropped_pieces) < MAX_LISTED_PIECES:
            self.dropped_pieces.append((epoch, piece))

    def summarize_drops(self) -> dict[str, Any]:
        """Counts of dropped samples and gradients, for the summary."""
        pieces = [[epoch, *piece] for epoch, piece in self.dropped_pieces]
        return {
            "gradients": self.dropped_gradients,
            "samples": self.dropped_samples,
            "pieces": pieces,
        }


class UndealtSamples:
    """The samples of a part of an epoch that are not dealt yet.

    Pieces that have to be dealt again come first, then the global batches in order. `epoch_part` is
    the epoch and the number of the first batch in the part; `batch_sizes` are numbers of samples.
    """

    def __init__(self, part: EpochPart | None = None, sizes: Sequence[int] = ()) -> None:
        self.epoch_part, self.batch_sizes = part, sizes
        self.is_stopped = False  # no more samples are dealt in this epoch
        # Batch (counted from the first one of the part) and sample that are dealt next.
        self._next_sample = (0, 0)
        self._returned_pieces = deque[SampleSpan]()

    @property
    def has_samples(self) -> bool:
        """Whether any samples are left."""
        return bool(self._returned_pieces) or self._next_sample[0] < len(self.batch_sizes)

    def take_back_pieces(self, pieces: Iterable[SampleSpan]) -> None:
        """Take back pieces that have to be dealt again."""
        self._returned_pieces.extend(pieces)

    def cut_piece(self, most: int) -> SampleSpan | None:
        """Cut off the next piece, of at most `most` samples. None if no samples are left."""
        if self._returned_pieces:
            batch, start, stop = self._returned_pieces.popleft()
            if stop - start > most:
                self._returned_pieces.appendleft(SampleSpan(batch, start + most, stop))
            return SampleSpan(batch, start, min(start + most, stop))
        batch_offset, start = self._next_sample
        if self.epoch_part is None or batch_offset == len(self.batch_sizes):
            return None
        stop = min(start + most, self.batch_sizes[batch_offset])
        self._next_sample = (
            (batch_offset, stop) if stop < self.batch_sizes[batch_offset] else (batch_offset + 1, 0)
        )
        return SampleSpan(self.epoch_part[1] + batch_offset, start, stop)


class NoteBox:
    """Notes from workers to the first worker. Each is kept until it has arrived there."""

    def __init__(self) -> None:
        self._notes: list[tuple[int, Tensor]] = []
        self._last_numbers: dict[int, int] = {}  # number of the last note, by worker

    def post_note(self, worker: int, letter: Tensor, number: int = 0) -> None:
        """Keep a note. `number` counts the worker's notes from 1 on: a repeated one is ignored."""
        if not number or number > self._last_numbers.get(worker, 0):
            self._notes.append((worker, letter))
            self._last_numbers[worker] = number

    def collect_notes(self, had: int = 0) -> list[tuple[int, Tensor]]:
        """Collect all notes, after removing the first `had`, which have arrived."""
        del self._notes[:had]
        return list(self._notes)


class SampleScheduler:
    """Deals the samples of one run to its workers, within the staleness bound (`worker_clocks`).

    Invariants:

    - `_parked_workers` is part of `_active_workers`, which have turns to take in this part of the
      epoch. A parked worker asked for a piece when none was left, and waits for pieces that others
      may drop. The active workers that aren't parked are the running workers.
    - A dealt piece is in `_pieces_under_way` until its turn is complete. If no optimizer stepped in
      that turn, the piece is then in `_carried_pieces` until one does. Only these pieces are dealt
      again when their worker is lost.
    - `_held_workers` have completed a turn, and may not begin the next one yet.
    - `_first_arrivals` (backup workers) and `_partial_steps` (a bound) have an entry for each
      optimizer. A run uses only one of the two.
    """

    def __init__(self) -> None:
        self.tally = ScheduleTally()
        self._clocks = WorkerClocks()
        self.notes = NoteBox()
        self._undealt_samples = UndealtSamples()
        self._pieces_under_way: dict[int, list[SampleSpan]] = {}
        self._carried_pieces: dict[int, list[SampleSpan]] = {}
        # By worker: its last piece and the number of that, to give it again if asked again.
        self._last_pieces: dict[int, tuple[int, SampleSpan]] = {}
        self._lost_workers: set[int] = set()
        self._active_workers: set[int] = set()
        self._parked_workers: set[int] = set()
        self._first_arrivals: dict[int, FirstArrivals] = {}
        self._partial_steps: dict[int, PartialSteps] = {}
        self._turn_starts: dict[int, float] = {}  # start of the turn, by worker
        self._held_workers: set[int] = set()
        # Workers whose oldest piece is in a round already (`settle_pieces`).
        self._settled_workers: set[int] = set()
        # Whether no more pieces are dealt, until all workers have asked for one and come together.
        self._is_pausing = False
        # Number of times that this part was resumed after such a pause.
        self._times_resumed = 0

    @property
    def clocks(self) -> dict[int, int]:
        """Number of turns that each worker has completed."""
        return self._clocks.completed_turns

    @property
    def running_workers(self) -> set[int]:
        """Workers that have turns to take, and don't wait for pieces that others may drop."""
        return self._active_workers - self._parked_workers

    # ---- samples

    def begin_dealing(
        self, epoch: int, first: int, sizes: Sequence[int], workers: Iterable[int], times: int = 0
    ) -> None:
        """Begin to deal the global batches of an epoch, or of the next part of one.

        Every worker calls this, when no worker has a turn under way. Only the first call counts.

        Args:
            epoch: Number of the epoch.
            first: Number of the first of these batches in the epoch.
            sizes: Number of samples in each batch.
            workers: The workers that take part.
            times: Number of times that this part was resumed after a pause (`pause_dealing`),
                perhaps by other workers.

        Raises:
            Mismatch: If workers disagree, or are in the middle of another part.
        """
        part, samples = (epoch, first), self._undealt_samples
        if samples.epoch_part == part and times == self._times_resumed:
            if list(sizes) != list(samples.batch_sizes):
                raise Mismatch(f"workers deal different batches in epoch {epoch}")
            return
        busy_workers = [
            worker for worker in self._active_workers if self._pieces_under_way.get(worker)
        ]
        if busy_workers:
            raise Mismatch(
                f"epoch {epoch} can't begin: workers {busy_workers} are in the middle of another"
            )
        if not sizes or min(sizes) < 1:
            raise Mismatch("there is nothing to deal, or a batch without samples")
        # A part that is resumed keeps its samples, and goes on where it was paused.
        if samples.epoch_part == part:
            samples.batch_sizes = sizes
        else:
            self._undealt_samples = UndealtSamples(part, sizes)
        self._times_resumed, self._is_pausing = times, False
        self._active_workers, self._parked_workers = {*workers} - self._lost_workers, set()
        self._pieces_under_way = {worker: [] for worker in self._active_workers}
        self._carried_pieces.clear()
        self._turn_starts.clear()
        for gathering in self._partial_steps.values():
            gathering.begin_epoch()
        # All workers begin at the same clock.
        latest = max(self.clocks.values(), default=0)
        self._clocks = WorkerClocks(dict.fromkeys(self._active_workers, latest))

    def deal_piece(self, worker: int, most: int, number: int = 0) -> SampleSpan | bool | None:
        """Deal the next piece, of at most `most` samples, to a worker.

        If `is_paused`, a worker that gets False goes on when all workers have come together. A
        worker without turns to take (`is_active`) is done.

        Args:
            worker: The worker that asks.
            most: Largest number of samples in the piece.
            number: Count of the worker's pieces, from 1 on; 0: not counted. A worker that asks
                again for the same piece gets it again.

        Returns:
            The piece; False if there is none for this worker, or not now; None if there may be one
            later.
        """
        if worker not in self._pieces_under_way or most < 1:
            raise Mismatch(f"worker {worker} has no turns to take, or asks for {most} samples")
        last_piece = self._last_pieces.get(worker)
        if last_piece is not None and number == last_piece[0] > 0:
            return last_piece[1]
        if worker not in self._active_workers:
            return False
        piece = (
            None
            if self._undealt_samples.is_stopped or self.is_paused
            else self._undealt_samples.cut_piece(most)
        )
        if piece is not None:
            self._parked_workers.discard(worker)
            self._pieces_under_way[worker].append(piece)
            self._last_pieces[worker] = number, piece
            return piece
        # No piece is left for now. The worker first completes the turns that it has begun.
        if self._pieces_under_way[worker]:
            return False
        # Another worker may still drop its piece, which is dealt again then.
        if not self._undealt_samples.is_stopped and any(
            self._pieces_under_way[other] for other in self._active_workers
        ):
            self._parked_workers.add(worker)
            return None
        if self.is_paused:
            self._parked_workers.add(worker)
            return False if self._parked_workers >= self._active_workers else None
        self.leave_epoch(worker)
        return False

    def pause_dealing(self) -> None:
        """Stop dealing, so that all workers end their turns and come together.

        Does nothing if a worker has ended the epoch already.
        """
        self._is_pausing = self._active_workers == self.clocks.keys()

    @property
    def is_paused(self) -> bool:
        """Whether dealing has stopped, with samples left for later."""
        return self._is_pausing and self._undealt_samples.has_samples

    def remove_lost_workers(self, survivors: Set[int]) -> tuple[list[tuple[int, int]], int]:
        """Go on with the survivors alone, and deal the pieces of lost workers again.

        Returns:
            The steps (optimizer, step) that were decided, but that none of the survivors makes; and
            the number of samples that no worker takes any more.
        """
        lost = self._pieces_under_way.keys() - survivors
        self._lost_workers |= lost
        pieces = [
            piece
            for worker in sorted(lost)
            for piece in [
                *self._carried_pieces.pop(worker, ()),
                *self._pieces_under_way.pop(worker)[worker in self._settled_workers :],
            ]
        ]
        self._active_workers, self._parked_workers, self._held_workers = (
            self._active_workers & survivors,
            self._parked_workers & survivors,
            self._held_workers & survivors,
        )
        self._clocks.remove_lost_workers(survivors)
        if self._active_workers:
            self._undealt_samples.take_back_pieces(pieces)
        # If the survivors have ended the epoch, no worker is left to take these samples.
        undealt = (
            0
            if self._active_workers or self._undealt_samples.is_stopped
            else sum(piece.stop - piece.start for piece in pieces)
        )
        makers: list[tuple[int, FirstArrivals | PartialSteps]] = [
            *self._first_arrivals.items(),
            *self._partial_steps.items(),
        ]
        return [
            (optimizer, step)
            for optimizer, steps in makers
            for step in steps.remove_lost_workers(survivors)
        ], undealt

    def has_turns_under_way(self, worker: int) -> bool:
        """Whether the worker has begun turns to complete first."""
        return bool(self._pieces_under_way.get(worker))

    def settle_pieces(self, worker: int) -> None:
        """Record that all of a worker's turns, with the one under way, are in a round.

        Their pieces are not dealt again if the worker is lost.
        """
        self._carried_pieces.pop(worker, None)
        if self._pieces_under_way.get(worker):
            self._settled_workers.add(worker)

    def is_active(self, worker: int) -> bool:
        """Whether the worker has turns to take in this epoch, or may have."""
        return worker in self._active_workers

    def leave_epoch(self, worker: int) -> None:
        """Record that a worker begins no more turns in this epoch. No other worker waits for it."""
        self._is_pausing = False
        self._active_workers.discard(worker)
        self._parked_workers.discard(worker)

    def stop_dealing(self) -> None:
        """Stop dealing for this epoch."""
        self._undealt_samples.is_stopped = True

    # ---- clocks

    def complete_turn(
        self, worker: int, clock: int, *, dropped: bool = False, carried: bool = False
    ) -> None:
        """Record that a worker has completed turn `clock`, of its oldest piece.

        Args:
            worker: The worker.
            clock: Number of turns that it has completed with this one.
            dropped: The samples of the turn are in no step.
            carried: The samples are in no step yet, because no optimizer stepped in the turn.
        """
        if not self._pieces_under_way.get(worker):
            raise Mismatch(f"worker {worker} has completed a turn that it hasn't begun")
        self._clocks.complete_turn(worker, clock)
        self._held_workers.add(worker)
        piece = self._pieces_under_way[worker].pop(0)
        self._settled_workers.discard(worker)
        self._carried_pieces[worker] = (
            [*self._carried_pieces.get(worker, ()), piece] if carried else []
        )
        if dropped:
            assert self._undealt_samples.epoch_part is not None
            self.tally.count_dropped_piece(self._undealt_samples.epoch_part[0], piece)

    @property
    def slowest_clock(self) -> int:
        """The smallest clock among the running workers."""
        return self._clocks.find_slowest_clock(self.running_workers)

    def may_begin_turn(self, worker: int, bound: float) -> bool:
        """Whether a worker may begin its next turn: it is within the bound, or takes none here."""
        return worker not in self._active_workers or self._clocks.may_begin_turn(
            worker, self.running_workers, bound
        )

    def record_permission(self, worker: int, now: float = 0.0) -> None:
        """Record that a worker was told that it may go on."""
        self._held_workers.discard(worker)
        self.begin_turn(worker, now)
        self.tally.leads[max(self._clocks.compute_lead(worker, self.running_workers), 0)] += 1

    def begin_turn(self, worker: int, now: float, *, first: bool = False) -> None:
        """Record that a worker begins a turn at time `now` (seconds, of any clock).

        `first`: the turn is the first one of an epoch. It counts only in the first epoch, because
        later epochs begin with turns of unknown length.
        """
        if first and self._partial_steps:
            return
        self._turn_starts[worker] = now
        for gathering in self._partial_steps.values():
            gathering.begin_turn(worker, now)

    def list_slowest_workers(self, worker: int) -> list[tuple[int, int]]:
        """List the workers that this one waits for, and their clocks."""
        return self._clocks.list_slowest_workers(worker, self.running_workers)

    # ---- which workers make a step, with backup workers

    def record_arrival(
        self, worker: int, optimizer: int, step: int, contribution: Any, backups: int
    ) -> StepDecision | bool | None:
        """Record that a worker has pushed its whole gradient for a step.

        The step is decided once all but `backups` of the workers with turns to take have arrived.

        Returns:
            The decision if this worker takes part in the step; False if the worker is too late;
            None if the step isn't decided yet.
        """
        self._clocks.check_takes_turns(worker)
        arrivals, running = (
            self._first_arrivals.setdefault(optimizer, FirstArrivals(optimizer)),
            self.running_workers,
        )
        return arrivals.record_arrival(
            worker,
            step,
            contribution,
            running,
            max(min(len(self.clocks) - backups, len(running)), 1),
        )

    def get_last_decided(self, optimizer: int) -> int:
        """Get the number of the last decided step of an optimizer."""
        return (
            self._first_arrivals[optimizer].last_decided if optimizer in self._first_arrivals else 0
        )

    def list_absent_workers(self, optimizer: int, step: int) -> list[tuple[int, int]]:
        """List the running workers that have not arrived at a step yet, and their clocks."""
        gathering, arrivals = (
            self._partial_steps.get(optimizer),
            self._first_arrivals.get(optimizer, FirstArrivals(optimizer)),
        )
        came = arrivals.get_arrived_workers(step) if gathering is None else gathering.contributions
        return [
            (worker, self.clocks[worker])
            for worker in sorted(self.running_workers)
            if worker not in came
        ]

    # ---- which workers make a step, within a bound

    def record_gradient(
        self,
        worker: int,
        optimizer: int,
        number: int,
        contribution: Any,
        *,
        bound: float,
        now: float,
        part: bool = False,
    ) -> StepMade | OpenStep | None:
        """Record that a worker has pushed gradient `number`, and make the step if it is due.

        A step has the gradients of all running workers. Late workers are left out (`PartialSteps`),
        unless none of the other workers could go on with the step then.

        Args:
            worker: The worker that has pushed.
            optimizer: Number of the optimizer.
            number: Count of the worker's gradients for this optimizer, from 1 on.
            contribution: What the worker contributes. It is part of the step.
            bound: The staleness bound, in turns.
            now: Time in seconds, of any clock.
            part: A late worker may go on while the step is open. It asks again before it pushes
                more.

        Returns:
            The step that has the gradient; an `OpenStep` if the worker goes on before it is made;
            None if the step isn't made yet.
        """
        self._clocks.check_takes_turns(worker)
        gathering = self._partial_steps.setdefault(optimizer, PartialSteps(self._turn_starts))
        step = gathering.record_gradient(worker, number, contribution, now)
        if step is not None:
            return step
        # The step isn't delayed by workers that wait themselves: for permission to begin a turn, or
        # for a step of another optimizer.
        elsewhere = {
            other
            for one in self._partial_steps.values()
            if one is not gathering
            for other in one.waiting_workers
        }
        absent = (
            self.running_workers - self._held_workers - elsewhere - gathering.contributions.keys()
        )
        if gathering.release_if_late(worker, absent if part else (), now):
            self._clocks.leave_step_open(optimizer, worker)
            return OpenStep(gathering.steps_made)
        gathering.next_check = math.inf
        if not self._clocks.are_all_blocked(
            gathering.contributions, self.running_workers, bound
        ) and not gathering.is_awaiting_workers(absent, now):
            step = gathering.make_step(absent)
            self._clocks.record_step(optimizer, step.contributions)
        return step

    def list_steps_made(self) -> list[list[int]]:
        """List the number of steps made within the bound: [optimizer, steps] for each optimizer.

        The servers may not have taken the last one yet.
        """
        return [
            [optimizer, gathering.steps_made]
            for optimizer, gathering in self._partial_steps.items()
        ]

    @property
    def next_check(self) -> float:
        """Time of the next look at open steps if no message comes before."""
        return min(
            (gathering.next_check for gathering in self._partial_steps.values()), default=math.inf
        )

    def summarize_schedule(self) -> dict[str, Any]:
        """Collect the statistics for the summary."""
        gatherings = self._partial_steps.values()
        return {
            "staleness": _merge_counters([self.tally.leads]),
            "steps_by_workers": _merge_counters(
                gathering.steps_by_worker_count for gathering in gatherings
            ),
            "steps_late": _merge_counters(gathering.gradients_by_age for gathering in gatherings),
            "dropped": self.tally.summarize_drops(),
        }


def _merge_counters(counters: Iterable[Counter[int]]) -> dict[str, int]:
    """Add up the counters, with text as keys, as the summary has them."""
    return {str(key): count for key, count in sorted(sum(counters, Counter[int]()).items())}
