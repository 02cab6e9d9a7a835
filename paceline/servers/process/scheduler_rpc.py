"""The scheduler's messages: what workers ask the sample scheduler on the first server
(`protocol.samples` has the messages).
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

LONGEST = 1 << 22  # batches in a part of an epoch, and bytes of a note


class SchedulerRpc:
    """Answers the scheduler's messages.

    `handlers`: what is done for each request of a worker; None where the reply has to wait.
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
        """Seconds to wait for a message before delayed answers are tried again, at most `most`."""
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
        found = self.scheduler.take(worker, request.most, request.number)
        if found is None:
            return None
        piece = (found.batch, found.start, found.stop) if isinstance(found, tuple) else None
        paused = piece is None and self.scheduler.paused and not self.scheduler.busy(worker)
        return samples.Samples(piece, over=not self.scheduler.takes(worker), paused=paused)

    def _pause(self, worker: int, request: samples.PauseDealing) -> Acknowledged:
        self.scheduler.pause()
        return Acknowledged()

    def _leave(self, worker: int, request: samples.LeaveEpoch) -> Acknowledged:
        self.scheduler.leave(worker)
        return Acknowledged()

    def _complete(self, worker: int, request: samples.CompleteTurn) -> samples.StepsDecided | None:
        # else it has come before, and had to wait
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
        found = self.scheduler.arrive(
            worker, optimizer, request.step, contribution, request.backups
        )
        if isinstance(found, StepDecision):
            return _assigned(request.step, {other: found.came[other] for other in found.workers})
        return (
            None
            if found is None
            else samples.StepAssignment(self.scheduler.decided(optimizer), late=True)
        )

    def _gather(self, worker: int, request: samples.GatherStep) -> samples.StepAssignment | None:
        how: dict[str, Any] = {
            "bound": request.bound,
            "now": time.monotonic(),
            "part": request.may_go_on,
        }
        made = self.scheduler.gather(
            worker, request.optimizer, request.number, _sound(request.contribution), **how
        )
        if made is None:
            return None
        slowest = self.scheduler.slowest
        if isinstance(made, OpenStep):
            return samples.StepAssignment(made.after, is_open=True, slowest=slowest)
        return _assigned(made.number, made.came, mine=worker in made.takers, slowest=slowest)

    def _list_not_arrived(
        self, worker: int, request: samples.ListNotArrived
    ) -> samples.MissingWorkers:
        return samples.MissingWorkers(tuple(self.scheduler.absent(request.optimizer, request.step)))

    # ---- notes, and losses

    def _post(self, worker: int, request: samples.PostNote) -> samples.Notes:
        nbytes = request.note.nbytes
        if nbytes > LONGEST:
            raise UsageError(f"a letter may have {LONGEST} bytes, and this one has {nbytes}")
        if nbytes:
            self.scheduler.notes.post(worker, request.note, request.number)
        if request.stop:
            self.scheduler.stop()
        found = self.scheduler.notes.collect(request.had) if request.collect else []
        return samples.Notes(tuple(other for other, _ in found), tuple(note for _, note in found))

    def _lose(self, worker: int, request: samples.LoseWorkers) -> samples.LostWork:
        steps, nobodys = self.scheduler.lose({*request.living})
        return samples.LostWork(tuple(steps), nobodys)


def _sound(contribution: samples.Contribution) -> samples.Contribution:
    """Check the message of a worker that comes to a step; it is kept, and sent to others.

    Raises `UsageError` for an invalid one.
    """
    if not math.isfinite(contribution.part):
        raise UsageError("a part of a batch is a number")
    return contribution


def _assigned(
    step: int, came: Mapping[int, samples.Contribution], *, mine: bool = True, slowest: int = 0
) -> samples.StepAssignment:
    """Return the step that these workers make together, with the settings of the first."""
    parts, settings = (
        math.fsum(each.part for each in came.values()),
        next(iter(came.values())).settings,
    )
    return samples.StepAssignment(step, False, False, mine, tuple(came), parts, settings, slowest)
