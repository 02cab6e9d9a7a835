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
from paceline.servers.worker.clipping import shrink
from paceline.servers.worker.link import ServerLink
from paceline.servers.worker.recovery import LockstepRecovery, ServerRecovery
from paceline.servers.worker.replication import ServerReplication
from paceline.servers.worker.sample_queue import SampleQueueClient
from paceline.servers.worker.scheduled_steps import ScheduledSteps

if TYPE_CHECKING:
    from paceline.servers.tables.steps import PerWorkerRowSteps

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

    def survive(self, copies: ServerReplication) -> None:
        """Make all later steps so that servers and workers may be lost."""
        ...

    def begin(self) -> None:
        """Get ready for steps, after servers have been started."""
        ...

    def pushing(self, number: int) -> None:
        """Prepare for the first push of an optimizer's next gradient."""
        ...

    def step(self, number: int) -> None:
        """Make a step of an optimizer.

        Raises `CallDiscarded` if the samples of the turn are dealt again.
        """
        ...

    def norms(self, numbers: Sequence[int], kind: float, limit: float) -> list[float]:
        """Compute norms of the gradients that make the next steps of these optimizers.

        Args:
            numbers: The optimizers.
            kind: Order p of the p-norm.
            limit: Norm to which the gradients will be clipped together.

        Returns:
            The norm of each part. Their p-norm is the total norm.
        """
        ...

    def commit(self) -> None:
        """End a turn. If this worker is too far ahead of others, wait."""
        ...

    def abort(self) -> None:
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
        self._told: list[optimizers.Settings] = []  # by optimizer: settings that servers have
        self.recovery: LockstepRecovery | None = None

    def survive(self, copies: ServerReplication) -> None:
        self.recovery = LockstepRecovery(self._link, copies)

    def begin(self) -> None:
        self._told = [optimizers.settings(optimizer) for optimizer in self._link.optimizers]

    def pushing(self, number: int) -> None: ...

    def _settle(self, number: int, *, wait: bool = True) -> tuple[int, ...]:
        """Push the gradients of the next step. Returns the workers that make it."""
        if self.recovery is not None:
            return tuple(self.recovery.settle(number))
        self._link.settle(number, wait=wait)
        return tuple(self._link.workers)

    def _repeat(self, act: Callable[[], T], what: str) -> T:
        """Run `act`. After a loss that the run survives, run it again on all workers."""
        return (
            act()
            if self.recovery is None
            else self._link.context.agreement.repeat_until_settled(act, what=what)
        )

    def _wait(self, sent: SentRequest[R], what: str, number: int, step: int) -> R:
        """Wait for the reply to a request that servers answer when all workers have pushed."""
        link = self._link
        # A settled step waits for no other worker, so there is none to name in an error.
        if self.recovery is not None:
            return sent.wait(link.seconds)
        return link.wait(sent, what, ListAbsent(Index(number), step, tuple(link.workers)))

    def step(self, number: int) -> None:
        link, makers = self._link, self._settle(number, wait=False)
        units, now, step = (
            link.units(number),
            optimizers.settings(link.optimizers[number]),
            link.steps_taken[number] + 1,
        )
        # After a loss a server may not have got the last change, so it gets all settings.
        changes = (
            optimizers.changed(self._told[number], now)
            if self.recovery is None
            else dict(enumerate(now))
        )
        factor, turn = link.factors.pop(number, 1.0), link.context.step_state.step
        close = CloseStep(Index(number), step, turn, makers, factor, tuple(changes.items()))
        if self.recovery is not None:
            close = self.recovery.decided(close)

        # The parameters are requested before the step is made: servers answer as soon as they
        # have them.
        def act() -> None:
            closes, reads = link.everywhere(number, close), link.ask_for(units, step)
            with link.connections.waiting():
                for sent in closes:
                    self._wait(sent, f"optimizer.step {step}", number, step)
            link.take_in(units, reads)

        self._repeat(act, "optimizer.step")
        self._told[number], link.steps_taken[number] = now, step
        if self.recovery is not None:
            self.recovery.stepped(number)

    def norms(self, numbers: Sequence[int], kind: float, limit: float) -> list[float]:
        link, is_settled = self._link, self.recovery is not None
        # Gradients must be on servers before the clip, and may not change after it.
        makers = {number: self._settle(number) for number in numbers}
        steps = {number: link.steps_taken[number] + 1 for number in numbers}
        requests = {
            number: ReadNorm(Index(number), steps[number], makers[number], kind, is_settled)
            for number in numbers
        }

        def act() -> list[float]:
            all_sent = [
                (number, sent)
                for number in numbers
                for sent in link.everywhere(number, requests[number], ask=is_settled)
            ]
            return [
                self._wait(sent, "run.clip", number, -steps[number]).norm
                for number, sent in all_sent
            ]

        return self._repeat(act, "run.clip")

    def commit(self) -> None:
        if self.recovery is not None:
            self.recovery.commit()

    def abort(self) -> None:
        if self.recovery is not None:
            self.recovery.abort()

    def regroup(self) -> None:
        assert self.recovery is not None
        self.recovery.regroup()


class Asynchronous(ScheduledSteps):
    """Asynchronous: each gradient is a step of its own."""

    def _step(self, number: int) -> None:
        link, step = self._link, self._gradient(number)
        units = link.settle(number, wait=False)
        factor, part = link.factors.get(number, 1.0), link.context.step_state.share_of_step
        settings = tuple(enumerate(optimizers.settings(link.optimizers[number])))
        applied = link.everywhere(
            number, ApplyGradient(Index(number), step, factor, part, settings)
        )
        reads = link.ask_for(units, 0)
        applied += self._rows.apply(number)
        for sent in applied:
            sent.wait(link.seconds)
        link.take_in(units, reads)
        link.steps_taken[number] += 1

    def _norm_of_step(self, number: int, kind: float, limit: float, *, may_go_on: bool) -> float:
        return self._link.norm([number], kind)


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
        self._known: dict[int, int] = {}
        # Optimizers whose step with this worker's last gradient was open when it went on.
        self._open: set[int] = set()
        # By optimizer with an open step: the type of the norm, and its limit.
        self._clips: dict[int, tuple[float, float]] = {}

    def _ask(self, number: int, *, may_go_on: bool) -> StepAssignment:
        return self._gather(
            number, self._gradient(number), may_go_on=may_go_on and self.recovery is None
        )

    def _gather(self, number: int, gradient: int, *, may_go_on: bool) -> StepAssignment:
        """Ask the scheduler for the step of a gradient; with `may_go_on` it may still be open."""
        return self._call(
            number,
            gradient,
            0,
            partial(GatherStep, Index(number), gradient, self._bound, may_go_on),
        )

    def _close(self, number: int, assignment: StepAssignment, *, read: bool = True) -> None:
        # An open step is closed later, in `prepare_push`. Until then the worker trains on the
        # parameters of the last step that was made.
        if assignment.is_open:
            link, units = self._link, self._link.units(number)
            self._open.add(number)
            link.take_in(units, link.ask_for(units, assignment.step))
            link.steps_taken[number] = assignment.step
            self._rows.go(number, assignment.step)
        else:
            super()._close(number, assignment, read=read)
        if read:
            self._known[number] = assignment.slowest

    def pushing(self, number: int) -> None:
        """Wait until this worker's last gradient is in a step that servers have made."""
        if number not in self._open:
            return
        link, clip = self._link, self._clips.pop(number, None)
        assignment = self._gather(number, self._count[number], may_go_on=False)
        self._open.remove(number)
        # One of the workers of the step closes it, and the others wait for it.
        if assignment.mine:
            if clip is not None:
                link.factors[number] = shrink(self._norm(number, assignment, clip[0]), clip[1])
            self._close(number, assignment, read=False)
            link.factors.pop(number, None)
        else:
            for sent in link.everywhere(number, AwaitStep(Index(number), assignment.step)):
                link.wait(
                    sent,
                    f"optimizer.step {assignment.step}",
                    ListNotArrived(Index(number), assignment.step),
                )
            self._rows.go(number, assignment.step)

    def _norm_of_step(self, number: int, kind: float, limit: float, *, may_go_on: bool) -> float:
        """Compute the norm of a step's gradient; of the own gradient if the step is still open."""
        assignment = self._decide(number, may_go_on=may_go_on)
        if not assignment.is_open:
            return self._norm(number, assignment, kind)
        self._clips[number] = kind, limit
        return self._link.norm([number], kind)

    def _follow(self) -> None:
        """If this worker is too far ahead of the slowest, wait, and read the new parameters."""
        link, sample_queue = self._link, self.sample_queue
        turns_read = min(self._known.get(number, 0) for number in range(len(link.optimizers)))
        # The bound holds for the parameters: they must have all gradients of `bound` turns ago.
        if sample_queue.clock - turns_read <= self._bound:
            return
        steps = sample_queue.go()
        link.context.agreement.retry_after_losses(lambda: link.catch_up(steps))
        for number, step in steps.items():
            self._rows.go(number, step)
        self._known = dict.fromkeys(
            range(len(link.optimizers)), sample_queue.clock - int(self._bound)
        )


class BackupWorkers(ScheduledSteps):
    """Backup workers: the first workers to arrive make a step, all but `backups` of them.

    Later gradients are dropped.
    """

    def __init__(self, link: ServerLink, rows: PerWorkerRowSteps, *, backups: int) -> None:
        super().__init__(link, rows)
        self._backups = backups

    def _gradient(self, number: int) -> int:
        """Number of the next step. A gradient that is late for its step is in no later one."""
        return self._link.steps_taken[number] + 1

    def _ask(self, number: int, *, may_go_on: bool) -> StepAssignment:
        step = self._gradient(number)
        return self._call(
            number, step, step, partial(ArriveAtStep, Index(number), step, self._backups)
        )

    def _weigh(self, assignment: StepAssignment) -> tuple[float, float, bool]:
        return assignment.parts, 1.0, False

    def _skip(self, number: int, step: int) -> None:
        link, units = self._link, self._link.units(number)
        reads = link.ask_for(units, step)
        self._late = True
        link.take_in(units, reads, stepped=False)
        link.steps_taken[number] = step
        self._rows.go(number, step)
