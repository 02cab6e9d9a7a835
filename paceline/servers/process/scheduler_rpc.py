"""Answers the messages of workers to the sample scheduler on the first server.

`protocol.samples` defines the messages.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from paceline.errors import UsageError
from paceline.servers.process.arrivals import OpenStep, StepDecision
from paceline.servers.process.scheduler import SampleScheduler
from paceline.servers.protocol import samples
from paceline.servers.protocol.message import Acknowledged, Handlers

# Largest number of batches in a part of an epoch, and of bytes in a note.
LONGEST = 1 << 22


class SchedulerRpc:
    """Answers messages to the scheduler.

    `handlers` maps each request to the method that handles it. If that returns None, the reply has
    to wait.
    """

    def __init__(self) -> None:
        self.scheduler = SampleScheduler()
        self.handlers: Handlers = {
            samples.DealSamples: self._deal,
            samples.TakeSamples: self._take,
            samples.LeaveEpoch: self._leave,
            samples.PauseDealing: self._pause,
            samples.CompleteTurn: self._complete,
            samples.ListBehind: self._list_behind,
            samples.ArriveAtStep: self._arrive,
            samples.GatherStep: self._gather,
            samples.ListNotArrived: self._list_not_arrived,
            samples.PostNote: self._post,
            samples.LoseWorkers: self._lose,
        }

    def patience(self, most: float) -> float:
        """Compute the seconds to wait for a message before waiting requests are tried again.

        The result is at most `most`.
        """
        return min(max(self.scheduler.due - time.monotonic(), 0.001), most)

    # ---- samples and turns

    def _deal(self, worker: int, request: samples.DealSamples) -> samples.Clock:
        sizes = request.sizes
        if sizes.dim() != 1 or sizes.is_floating_point() or not 0 < sizes.numel() <= LONGEST:
            raise UsageError(
                f"a part of an epoch has 1 to {LONGEST} batches, each of a whole number of samples"
            )
        self.scheduler.begin(
            request.epoch, request.first, sizes.tolist(), request.workers, request.times
        )
        self.scheduler.starts(worker, time.monotonic(), first=True)
        return samples.Clock(self.scheduler.clocks[worker])

    def _take(self, worker: int, request: samples.TakeSamples) -> samples.Samples | None:
        span = self.scheduler.take(worker, request.most, request.number)
        if span is None:
            return None
        # A piece is a named tuple here, and plain numbers on the wire.
        piece = (span.batch, span.start, span.stop) if isinstance(span, tuple) else None
        paused = piece is None and self.scheduler.paused and not self.scheduler.busy(worker)
        return samples.Samples(piece, over=not self.scheduler.takes(worker), paused=paused)

    def _pause(self, worker: int, request: samples.PauseDealing) -> Acknowledged:
        self.scheduler.pause()
        return Acknowledged()

    def _leave(self, worker: int, request: samples.LeaveEpoch) -> Acknowledged:
        self.scheduler.leave(worker)
        return Acknowledged()

    def _complete(self, worker: int, request: samples.CompleteTurn) -> samples.StepsDecided | None:
        # A request that had to wait is handled again, but its turn counts only once.
        if request.clock > self.scheduler.clocks.get(worker, -1):
            self.scheduler.tick(
                worker, request.clock, dropped=request.dropped, carried=request.carried
            )
        if not self.scheduler.may(worker, request.bound):
            return None
        self.scheduler.went(worker, time.monotonic())
        return samples.StepsDecided(
            tuple((optimizer, step) for optimizer, step in self.scheduler.made())
        )

    def _list_behind(self, worker: int, request: samples.ListBehind) -> samples.MissingWorkers:
        return samples.MissingWorkers(tuple(self.scheduler.behind(worker)))

    # ---- who makes which step

    def _arrive(self, worker: int, request: samples.ArriveAtStep) -> samples.StepAssignment | None:
        optimizer, contribution = request.optimizer, _sound(request.contribution)
        decision = self.scheduler.arrive(
            worker, optimizer, request.step, contribution, request.backups
        )
        if isinstance(decision, StepDecision):
            return _assigned(
                request.step, {other: decision.came[other] for other in decision.workers}
            )
        return (
            None
            if decision is None
            else samples.StepAssignment(self.scheduler.decided(optimizer), late=True)
        )

    def _gather(self, worker: int, request: samples.GatherStep) -> samples.StepAssignment | None:
        how: dict[str, Any] = {
            "bound": request.bound,
            "now": time.monotonic(),
            "part": request.may_go_on,
        }
        step = self.scheduler.gather(
            worker, request.optimizer, request.number, _sound(request.contribution), **how
        )
        if step is None:
            return None
        slowest = self.scheduler.slowest
        if isinstance(step, OpenStep):
            return samples.StepAssignment(step.after, is_open=True, slowest=slowest)
        return _assigned(step.number, step.came, mine=worker in step.takers, slowest=slowest)

    def _list_not_arrived(
        self, worker: int, request: samples.ListNotArrived
    ) -> samples.MissingWorkers:
        return samples.MissingWorkers(tuple(self.scheduler.absent(request.optimizer, request.step)))

    # ---- notes, and losses

    def _post(self, worker: int, request: samples.PostNote) -> samples.Notes:
        nbytes = request.note.nbytes
        if nbytes > LONGEST:
            raise UsageError(f"a note may have {LONGEST} bytes, and this one has {nbytes}")
        if nbytes:
            self.scheduler.notes.post(worker, request.note, request.number)
        if request.stop:
            self.scheduler.stop()
        notes = self.scheduler.notes.collect(request.had) if request.collect else []
        return samples.Notes(tuple(other for other, _ in notes), tuple(note for _, note in notes))

    def _lose(self, worker: int, request: samples.LoseWorkers) -> samples.LostWork:
        steps, undealt = self.scheduler.lose({*request.living})
        return samples.LostWork(tuple(steps), undealt)


def _sound(contribution: samples.Contribution) -> samples.Contribution:
    """Check a worker's contribution to a step, which is kept, and sent to other workers.

    Raises `UsageError` for an invalid one.
    """
    if not math.isfinite(contribution.part):
        raise UsageError("a part of a batch is a number")
    return contribution


def _assigned(
    step: int,
    contributions: Mapping[int, samples.Contribution],
    *,
    mine: bool = True,
    slowest: int = 0,
) -> samples.StepAssignment:
    """Assign a step to the workers that make it together, with the settings of the first."""
    parts, settings = (
        math.fsum(contribution.part for contribution in contributions.values()),
        next(iter(contributions.values())).settings,
    )
    return samples.StepAssignment(
        step, False, False, mine, tuple(contributions), parts, settings, slowest
    )
