"""Answers the messages of workers to the sample scheduler on the first server.

`protocol.samples` defines the messages.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from paceline.errors import UsageError
from paceline.servers.process.late_gradients import OpenStep, StepDecision
from paceline.servers.process.scheduler import SampleScheduler
from paceline.servers.protocol import samples
from paceline.servers.protocol.message import Acknowledged, Handlers

# Largest number of batches in a part of an epoch, and of bytes in a note.
MAX_LENGTH = 1 << 22


class SchedulerRpc:
    """Answers messages to the scheduler.

    `handlers` maps each request to the method that handles it. If that returns None, the reply has
    to wait.
    """

    def __init__(self) -> None:
        self.scheduler = SampleScheduler()
        self._loss_listeners: list[Callable[[set[int]], None]] = []
        self.handlers: Handlers = {
            samples.DealSamples: self._deal_samples,
            samples.TakeSamples: self._take_samples,
            samples.LeaveEpoch: self._leave_epoch,
            samples.PauseDealing: self._pause_dealing,
            samples.CompleteTurn: self._complete_turn,
            samples.ListBehind: self._list_slowest_workers,
            samples.ArriveAtStep: self._arrive_at_step,
            samples.GatherStep: self._gather_step,
            samples.ListNotArrived: self._list_not_arrived,
            samples.PostNote: self._post_note,
            samples.LoseWorkers: self._lose_workers,
        }

    def add_loss_listener(self, listener: Callable[[set[int]], None]) -> None:
        """Call `listener` with the workers that are left after each loss."""
        self._loss_listeners.append(listener)

    def compute_receive_timeout(self, most: float) -> float:
        """Compute the seconds to wait for a message before waiting requests are tried again.

        The result is at most `most`.
        """
        return min(max(self.scheduler.next_check - time.monotonic(), 0.001), most)

    # ---- samples and turns

    def _deal_samples(self, worker: int, request: samples.DealSamples) -> samples.Clock:
        sizes = request.sizes
        if sizes.dim() != 1 or sizes.is_floating_point() or not 0 < sizes.numel() <= MAX_LENGTH:
            raise UsageError(
                f"a part of an epoch has 1 to {MAX_LENGTH} batches, each of a whole number of "
                "samples"
            )
        self.scheduler.begin_dealing(
            request.epoch, request.first, sizes.tolist(), request.workers, request.times
        )
        self.scheduler.begin_turn(worker, time.monotonic(), first=True)
        return samples.Clock(self.scheduler.clocks[worker])

    def _take_samples(self, worker: int, request: samples.TakeSamples) -> samples.Samples | None:
        span = self.scheduler.deal_piece(worker, request.most, request.number)
        if span is None:
            return None
        # A piece is a named tuple here, and plain numbers on the wire.
        piece = (span.batch, span.start, span.stop) if isinstance(span, tuple) else None
        paused = (
            piece is None
            and self.scheduler.is_paused
            and not self.scheduler.has_turns_under_way(worker)
        )
        return samples.Samples(piece, over=not self.scheduler.is_active(worker), paused=paused)

    def _pause_dealing(self, worker: int, request: samples.PauseDealing) -> Acknowledged:
        self.scheduler.pause_dealing()
        return Acknowledged()

    def _leave_epoch(self, worker: int, request: samples.LeaveEpoch) -> Acknowledged:
        self.scheduler.leave_epoch(worker)
        return Acknowledged()

    def _complete_turn(
        self, worker: int, request: samples.CompleteTurn
    ) -> samples.StepsDecided | None:
        # A request that had to wait is handled again, but its turn counts only once.
        if request.clock > self.scheduler.clocks.get(worker, -1):
            self.scheduler.complete_turn(
                worker, request.clock, dropped=request.dropped, carried=request.carried
            )
        if not self.scheduler.may_begin_turn(worker, request.bound):
            return None
        self.scheduler.record_permission(worker, time.monotonic())
        return samples.StepsDecided(
            tuple((optimizer, step) for optimizer, step in self.scheduler.list_steps_made())
        )

    def _list_slowest_workers(
        self, worker: int, request: samples.ListBehind
    ) -> samples.MissingWorkers:
        return samples.MissingWorkers(tuple(self.scheduler.list_slowest_workers(worker)))

    # ---- who makes which step

    def _arrive_at_step(
        self, worker: int, request: samples.ArriveAtStep
    ) -> samples.StepAssignment | None:
        optimizer, contribution = request.optimizer, _check_contribution(request.contribution)
        decision = self.scheduler.record_arrival(
            worker, optimizer, request.step, contribution, request.backups
        )
        if isinstance(decision, StepDecision):
            return _make_assignment(
                request.step, {other: decision.contributions[other] for other in decision.workers}
            )
        return (
            None
            if decision is None
            else samples.StepAssignment(self.scheduler.get_last_decided(optimizer), late=True)
        )

    def _gather_step(
        self, worker: int, request: samples.GatherStep
    ) -> samples.StepAssignment | None:
        how: dict[str, Any] = {
            "bound": request.bound,
            "now": time.monotonic(),
            "part": request.may_go_on,
        }
        step = self.scheduler.record_gradient(
            worker,
            request.optimizer,
            request.number,
            _check_contribution(request.contribution),
            **how,
        )
        if step is None:
            return None
        slowest = self.scheduler.slowest_clock
        if isinstance(step, OpenStep):
            return samples.StepAssignment(step.steps_before, is_open=True, slowest=slowest)
        return _make_assignment(
            step.number, step.contributions, mine=worker in step.waiting_workers, slowest=slowest
        )

    def _list_not_arrived(
        self, worker: int, request: samples.ListNotArrived
    ) -> samples.MissingWorkers:
        return samples.MissingWorkers(
            tuple(self.scheduler.list_absent_workers(request.optimizer, request.step))
        )

    # ---- notes, and losses

    def _post_note(self, worker: int, request: samples.PostNote) -> samples.Notes:
        nbytes = request.note.nbytes
        if nbytes > MAX_LENGTH:
            raise UsageError(f"a note may have {MAX_LENGTH} bytes, and this one has {nbytes}")
        if nbytes:
            self.scheduler.notes.post_note(worker, request.note, request.number)
        if request.stop:
            self.scheduler.stop_dealing()
        notes = self.scheduler.notes.collect_notes(request.had) if request.collect else []
        return samples.Notes(tuple(other for other, _ in notes), tuple(note for _, note in notes))

    def _lose_workers(self, worker: int, request: samples.LoseWorkers) -> samples.LostWork:
        for listener in self._loss_listeners:
            listener({*request.living})
        steps, undealt = self.scheduler.remove_lost_workers({*request.living})
        return samples.LostWork(tuple(steps), undealt)


def _check_contribution(contribution: samples.Contribution) -> samples.Contribution:
    """Check a worker's contribution to a step, which is kept, and sent to other workers.

    Raises `UsageError` for an invalid one.
    """
    if not math.isfinite(contribution.part):
        raise UsageError("a part of a batch is a number")
    return contribution


def _make_assignment(
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
