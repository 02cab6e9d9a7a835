"""Consistency models of the parameter server: when workers wait, and which gradients make a step.

    BulkSynchronous    all push, all close: one step with the sum of all
                       all workers are in the same step
    BackupWorkers      all push; the first to arrive make the step
                       a late worker takes the result, and goes on with the next turn
    StaleSynchronous   all push; the workers on time make the step
                       at most `staleness` turns ahead of the slowest; a late gradient is in the
                       next step, and its worker goes on before that is made
    Asynchronous       each applies its own push as a step
                       no worker waits

In all but the first model each worker takes its samples when it is ready for them (`sample_queue`).
In runs that survive losses a model has a recovering part (`recovery`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from paceline.servers.process import optimizers
from paceline.servers.protocol.message import Index, R, SentRequest
from paceline.servers.protocol.parameters import (
    ApplyGradient,
    AwaitStep,
    CloseStep,
    ListAbsent,
    ReadNorm,
)
from paceline.servers.protocol.samples import (
    ArriveAtStep,
    GatherStep,
    ListNotArrived,
    StepAssignment,
)
from paceline.servers.worker.clipping import compute_clip_factor
from paceline.servers.worker.link import ServerLink
from paceline.servers.worker.recovery import LockstepRecovery, ServerRecovery
from paceline.servers.worker.replication import ServerReplication
from paceline.servers.worker.sample_queue import SampleQueueClient
from paceline.servers.worker.scheduled_steps import ScheduledSteps

if TYPE_CHECKING:
    from paceline.servers.tables.row_steps import PerWorkerRowSteps

T = TypeVar("T")


class Consistency(Protocol):
    """A consistency model. Optimizers are numbered as in `ServerLink`."""

    @property
    def sample_queue(self) -> SampleQueueClient | None:
        """The queue from which workers out of lockstep take their samples; None in lockstep."""
        ...

    @property
    def recovery(self) -> ServerRecovery | None:
        """The part that recovers from losses; None if a loss ends the run."""
        ...

    def enable_recovery(self, copies: ServerReplication) -> None:
        """Make all later steps so that servers and workers may be lost."""
        ...

    def begin_steps(self) -> None:
        """Get ready for steps, after servers have been started."""
        ...

    def prepare_push(self, number: int) -> None:
        """Prepare for the first push of an optimizer's next gradient."""
        ...

    def make_step(self, number: int) -> None:
        """Make a step of an optimizer.

        Raises `CallDiscarded` if the samples of the turn are dealt again.
        """
        ...

    def compute_norms(self, numbers: Sequence[int], kind: float, limit: float) -> list[float]:
        """Compute norms of the gradients that make the next steps of these optimizers.

        Args:
            numbers: The optimizers.
            kind: Order p of the p-norm.
            limit: Norm to which the gradients will be clipped together.

        Returns:
            The norm of each part. Their p-norm is the total norm.
        """
        ...

    def commit_turn(self) -> None:
        """End a turn. If this worker is too far ahead of others, wait."""
        ...

    def abort_turn(self) -> None:
        """Undo the turn on servers, as its samples are dealt again.

        Raises `StateLost` if servers can't undo it.
        """
        ...

    def regroup(self) -> None:
        """Go on with the present workers and servers.

        Collective. Raises `StateLost` if no copy of a shard is left.
        """
        ...


class ConsistencyModel(NamedTuple):
    """A consistency model as data: the function that makes it, and its properties."""

    make: Callable[[ServerLink, PerWorkerRowSteps], Consistency]
    lockstep: bool = False  # all workers take the same steps
    drops: bool = False  # servers drop gradients that come too late
    alone: bool = False  # each gradient is a step of its own


class BulkSynchronous:
    """Bulk-synchronous: all workers make every step together."""

    sample_queue: None = None

    def __init__(self, link: ServerLink, rows: PerWorkerRowSteps) -> None:
        self._link = link
        self._known_settings: list[
            optimizers.Settings
        ] = []  # by optimizer: settings that servers have
        self.recovery: LockstepRecovery | None = None

    def enable_recovery(self, copies: ServerReplication) -> None:
        self.recovery = LockstepRecovery(self._link, copies)

    def begin_steps(self) -> None:
        self._known_settings = [
            optimizers.read_settings(optimizer) for optimizer in self._link.optimizers
        ]

    def prepare_push(self, number: int) -> None: ...

    def _push_gradients(self, number: int, *, wait: bool = True) -> tuple[int, ...]:
        """Push the gradients of the next step. Returns the workers that make it."""
        if self.recovery is not None:
            return tuple(self.recovery.settle_gradients(number))
        self._link.push_final_gradients(number, wait=wait)
        return tuple(self._link.worker_numbers)

    def _repeat_until_settled(self, act: Callable[[], T], what: str) -> T:
        """Run `act`. After a loss that the run survives, run it again on all workers."""
        return (
            act()
            if self.recovery is None
            else self._link.context.agreement.repeat_until_settled(act, what=what)
        )

    def _await_reply(self, sent: SentRequest[R], what: str, number: int, step: int) -> R:
        """Wait for the reply to a request that servers answer when all workers have pushed."""
        link = self._link
        # A settled step waits for no other worker, so there is none to name in an error.
        if self.recovery is not None:
            return sent.wait_for_reply(link.deadline)
        return link.await_reply(
            sent, what, ListAbsent(Index(number), step, tuple(link.worker_numbers))
        )

    def make_step(self, number: int) -> None:
        link, makers = self._link, self._push_gradients(number, wait=False)
        units, now, step = (
            link.list_units(number),
            optimizers.read_settings(link.optimizers[number]),
            link.steps_taken[number] + 1,
        )
        # After a loss a server may not have got the last change, so it gets all settings.
        changes = (
            optimizers.diff_settings(self._known_settings[number], now)
            if self.recovery is None
            else dict(enumerate(now))
        )
        factor, turn = link.clip_factors.pop(number, 1.0), link.context.step_state.step
        close = CloseStep(Index(number), step, turn, makers, factor, tuple(changes.items()))
        if self.recovery is not None:
            close = self.recovery.mark_decided(close)

        # The parameters are requested before the step is made: servers answer as soon as they
        # have them.
        def act() -> None:
            closes, reads = link.send_to_shards(number, close), link.request_units(units, step)
            with link.connections.count_waiting():
                for sent in closes:
                    self._await_reply(sent, f"optimizer.step {step}", number, step)
            link.receive_units(units, reads)

        self._repeat_until_settled(act, "optimizer.step")
        self._known_settings[number], link.steps_taken[number] = now, step
        if self.recovery is not None:
            self.recovery.complete_step(number)

    def compute_norms(self, numbers: Sequence[int], kind: float, limit: float) -> list[float]:
        link, is_settled = self._link, self.recovery is not None
        # Gradients must be on servers before the clip, and may not change after it.
        makers = {number: self._push_gradients(number) for number in numbers}
        steps = {number: link.steps_taken[number] + 1 for number in numbers}
        requests = {
            number: ReadNorm(Index(number), steps[number], makers[number], kind, is_settled)
            for number in numbers
        }

        def act() -> list[float]:
            all_sent = [
                (number, sent)
                for number in numbers
                for sent in link.send_to_shards(number, requests[number], ask=is_settled)
            ]
            return [
                self._await_reply(sent, "run.clip", number, -steps[number]).norm
                for number, sent in all_sent
            ]

        return self._repeat_until_settled(act, "run.clip")

    def commit_turn(self) -> None:
        if self.recovery is not None:
            self.recovery.commit_turn()

    def abort_turn(self) -> None:
        if self.recovery is not None:
            self.recovery.abort_turn()

    def regroup(self) -> None:
        assert self.recovery is not None
        self.recovery.regroup()


class Asynchronous(ScheduledSteps):
    """Asynchronous: each gradient is a step of its own."""

    def _attempt_step(self, number: int) -> None:
        link, step = self._link, self._get_gradient_number(number)
        units = link.push_final_gradients(number, wait=False)
        factor, part = link.clip_factors.get(number, 1.0), link.context.step_state.share_of_step
        settings = tuple(enumerate(optimizers.read_settings(link.optimizers[number])))
        applied = link.send_to_shards(
            number, ApplyGradient(Index(number), step, factor, part, settings)
        )
        reads = link.request_units(units, 0)
        applied += self._row_steps.apply_gradients(number)
        for sent in applied:
            sent.wait_for_reply(link.deadline)
        link.receive_units(units, reads)
        link.steps_taken[number] += 1

    def _compute_step_norm(
        self, number: int, kind: float, limit: float, *, may_go_on: bool
    ) -> float:
        return self._link.compute_own_norm([number], kind)


class StaleSynchronous(ScheduledSteps):
    """Stale-synchronous: a step takes the gradients of all workers that are on time, and of workers
    that were late for the step before.

    If a loss ends the run, a late worker doesn't wait for the open step, but goes on with the
    present parameters. It waits for that step before it pushes its next gradient. In runs that
    survive losses, late workers wait.
    """

    def __init__(self, link: ServerLink, rows: PerWorkerRowSteps, *, bound: int) -> None:
        super().__init__(link, rows, bound)
        # By optimizer: turns that all workers had completed when its parameters were last read.
        self._known_turns: dict[int, int] = {}
        # Optimizers whose step with this worker's last gradient was open when it went on.
        self._open_steps: set[int] = set()
        # By optimizer with an open step: the type of the norm, and its limit.
        self._pending_clips: dict[int, tuple[float, float]] = {}

    def _request_assignment(self, number: int, *, may_go_on: bool) -> StepAssignment:
        return self._gather_step(
            number, self._get_gradient_number(number), may_go_on=may_go_on and self.recovery is None
        )

    def _gather_step(self, number: int, gradient: int, *, may_go_on: bool) -> StepAssignment:
        """Ask the scheduler for the step of a gradient; with `may_go_on` it may still be open."""
        return self._send_contribution(
            number,
            gradient,
            0,
            partial(GatherStep, Index(number), gradient, self._staleness_bound, may_go_on),
        )

    def _close_step(self, number: int, assignment: StepAssignment, *, read: bool = True) -> None:
        # An open step is closed later, in `prepare_push`. Until then the worker trains on the
        # parameters of the last step that was made.
        if assignment.is_open:
            link, units = self._link, self._link.list_units(number)
            self._open_steps.add(number)
            link.receive_units(units, link.request_units(units, assignment.step))
            link.steps_taken[number] = assignment.step
            self._row_steps.advance_tables(number, assignment.step)
        else:
            super()._close_step(number, assignment, read=read)
        if read:
            self._known_turns[number] = assignment.slowest

    def prepare_push(self, number: int) -> None:
        """Wait until this worker's last gradient is in a step that servers have made."""
        if number not in self._open_steps:
            return
        link, clip = self._link, self._pending_clips.pop(number, None)
        assignment = self._gather_step(number, self._gradient_counts[number], may_go_on=False)
        self._open_steps.remove(number)
        # One of the workers of the step closes it, and the others wait for it.
        if assignment.mine:
            if clip is not None:
                link.clip_factors[number] = compute_clip_factor(
                    self._read_step_norm(number, assignment, clip[0]), clip[1]
                )
            self._close_step(number, assignment, read=False)
            link.clip_factors.pop(number, None)
        else:
            for sent in link.send_to_shards(number, AwaitStep(Index(number), assignment.step)):
                link.await_reply(
                    sent,
                    f"optimizer.step {assignment.step}",
                    ListNotArrived(Index(number), assignment.step),
                )
            self._row_steps.advance_tables(number, assignment.step)

    def _compute_step_norm(
        self, number: int, kind: float, limit: float, *, may_go_on: bool
    ) -> float:
        """Compute the norm of a step's gradient; of the own gradient if the step is still open."""
        assignment = self._get_assignment(number, may_go_on=may_go_on)
        if not assignment.is_open:
            return self._read_step_norm(number, assignment, kind)
        self._pending_clips[number] = kind, limit
        return self._link.compute_own_norm([number], kind)

    def _wait_for_slowest(self) -> None:
        """If this worker is too far ahead of the slowest, wait, and read the new parameters."""
        link, sample_queue = self._link, self.sample_queue
        turns_read = min(self._known_turns.get(number, 0) for number in range(len(link.optimizers)))
        # The bound holds for the parameters: they must have all gradients of `bound` turns ago.
        if sample_queue.clock - turns_read <= self._staleness_bound:
            return
        steps = sample_queue.wait_for_turn()
        link.context.agreement.retry_after_losses(lambda: link.read_all_units(steps))
        for number, step in steps.items():
            self._row_steps.advance_tables(number, step)
        self._known_turns = dict.fromkeys(
            range(len(link.optimizers)), sample_queue.clock - int(self._staleness_bound)
        )


class BackupWorkers(ScheduledSteps):
    """Backup workers: the first workers to arrive make a step, all but `backups` of them.

    Later gradients are dropped.
    """

    def __init__(self, link: ServerLink, rows: PerWorkerRowSteps, *, backups: int) -> None:
        super().__init__(link, rows)
        self._backups = backups

    def _get_gradient_number(self, number: int) -> int:
        """Number of the next step. A gradient that is late for its step is in no later one."""
        return self._link.steps_taken[number] + 1

    def _request_assignment(self, number: int, *, may_go_on: bool) -> StepAssignment:
        step = self._get_gradient_number(number)
        return self._send_contribution(
            number, step, step, partial(ArriveAtStep, Index(number), step, self._backups)
        )

    def _compute_weights(self, assignment: StepAssignment) -> tuple[float, float, bool]:
        return assignment.parts, 1.0, False

    def _skip_step(self, number: int, step: int) -> None:
        link, units = self._link, self._link.list_units(number)
        reads = link.request_units(units, step)
        self._is_late = True
        link.receive_units(units, reads, stepped=False)
        link.steps_taken[number] = step
        self._row_steps.advance_tables(number, step)
