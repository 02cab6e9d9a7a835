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

In all but the first each worker takes its samples when it is ready for them (`sample_queue`). If
losses are survived, a model has a recovering part (`recovery`).
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
    """A consistency model. Optimizers are known by their numbers."""

    @property
    def sample_queue(self) -> SampleQueueClient | None:
        """The queue from which workers that are not in lockstep take their samples; None where
        they are.
        """
        ...

    @property
    def recovery(self) -> ServerRecovery | None:
        """The part that goes on after a loss; None where nothing can be lost."""
        ...

    def survive(self, copies: ServerReplication) -> None:
        """Make steps from now on so that servers and workers may be lost."""
        ...

    def begin(self) -> None:
        """Begin, as servers have been started."""
        ...

    def pushing(self, number: int) -> None:
        """Prepare for a gradient of an optimizer to be pushed."""
        ...

    def step(self, number: int) -> None:
        """Make a step of an optimizer. Raises `CallDiscarded` where the turn is dealt again."""
        ...

    def norms(self, numbers: Sequence[int], kind: float, limit: float) -> list[float]:
        """Return norms of parts of the gradients that will make the next steps of these
        optimizers, clipped to `limit` together.
        """
        ...

    def commit(self) -> None:
        """End a turn. If this worker is too far ahead of others, wait."""
        ...

    def abort(self) -> None:
        """Undo the turn on servers, as it is dealt again.

        Raises `StateLost` where that can't be.
        """
        ...

    def regroup(self) -> None:
        """Go on with the workers and servers that are there now.

        Collective. Raises `StateLost` where no copy of a shard is left.
        """
        ...


class ConsistencyModel(NamedTuple):
    """A consistency model that was asked for: what makes it for a link and row steps, and what
    pushes and pulls depend on.
    """

    make: Callable[[ServerLink, PerWorkerRowSteps], Consistency]
    lockstep: bool = False  # all workers are meant to take the same steps
    drops: bool = False  # servers leave out what is pushed too late
    alone: bool = False  # each gradient is a step of its own


class BulkSynchronous:
    """Bulk-synchronous: all workers make every step together."""

    sample_queue: None = None

    def __init__(self, link: ServerLink, rows: PerWorkerRowSteps) -> None:
        self._link = link
        self._told: list[optimizers.Settings] = []  # by optimizer: the settings that servers know
        self.recovery: LockstepRecovery | None = None

    def survive(self, copies: ServerReplication) -> None:
        self.recovery = LockstepRecovery(self._link, copies)

    def begin(self) -> None:
        self._told = [optimizers.settings(optimizer) for optimizer in self._link.optimizers]

    def pushing(self, number: int) -> None: ...

    def _settle(self, number: int, *, wait: bool = True) -> tuple[int, ...]:
        """Push what this step is made of; return the workers that make it."""
        if self.recovery is not None:
            return tuple(self.recovery.settle(number))
        self._link.settle(number, wait=wait)
        return tuple(self._link.workers)

    def _repeat(self, act: Callable[[], T], what: str) -> T:
        """Run `act`; where losses are survived, again after each loss, on all workers."""
        return (
            act()
            if self.recovery is None
            else self._link.context.agreement.repeat_until_settled(act, what=what)
        )

    def _wait(self, sent: SentRequest[R], what: str, number: int, step: int) -> R:
        """Return the reply to a request; servers wait for the other workers before, unless all
        are known to have come.
        """
        link = self._link
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
        changes = (
            optimizers.changed(self._told[number], now)
            if self.recovery is None
            else dict(enumerate(now))
        )
        factor, turn = link.factors.pop(number, 1.0), link.context.step_state.step
        close = CloseStep(Index(number), step, turn, makers, factor, tuple(changes.items()))
        if self.recovery is not None:
            close = self.recovery.decided(close)

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
        link, decided = self._link, self.recovery is not None
        makers = {number: self._settle(number) for number in numbers}
        steps = {number: link.steps_taken[number] + 1 for number in numbers}
        asks = {
            number: ReadNorm(Index(number), steps[number], makers[number], kind, decided)
            for number in numbers
        }

        def act() -> list[float]:
            asked = [
                (number, sent)
                for number in numbers
                for sent in link.everywhere(number, asks[number], ask=decided)
            ]
            return [
                self._wait(sent, "run.clip", number, -steps[number]).norm for number, sent in asked
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
    """Stale-synchronous: a step is made by all workers on time, and by those that were late for the
    one before.

    Where nothing can be lost, a late worker doesn't wait for the open step, but goes on with the
    parameters there are; before it pushes more, that step has been made.
    """

    def __init__(self, link: ServerLink, rows: PerWorkerRowSteps, *, bound: int) -> None:
        super().__init__(link, rows, bound)
        # by optimizer: turns that all had completed when its parameters were last read
        self._known: dict[int, int] = {}
        # optimizers whose step with this worker's last gradient had not been made when it went on
        self._open: set[int] = set()
        # of the open ones: the kind of norm, and its limit
        self._clips: dict[int, tuple[float, float]] = {}

    def _ask(self, number: int, *, may_go_on: bool) -> StepAssignment:
        return self._gather(
            number, self._gradient(number), may_go_on=may_go_on and self.recovery is None
        )

    def _gather(self, number: int, gradient: int, *, may_go_on: bool) -> StepAssignment:
        """Ask in which step a gradient is; with `may_go_on` it may be open still."""
        return self._call(
            number,
            gradient,
            0,
            partial(GatherStep, Index(number), gradient, self._bound, may_go_on),
        )

    def _close(self, number: int, found: StepAssignment, *, read: bool = True) -> None:
        if found.is_open:
            link, units = self._link, self._link.units(number)
            self._open.add(number)
            link.take_in(units, link.ask_for(units, found.step))
            link.steps_taken[number] = found.step
            self._rows.go(number, found.step)
        else:
            super()._close(number, found, read=read)
        if read:
            self._known[number] = found.slowest

    def pushing(self, number: int) -> None:
        """Wait until what I pushed before is in a step that servers have made."""
        if number not in self._open:
            return
        link, clip = self._link, self._clips.pop(number, None)
        found = self._gather(number, self._count[number], may_go_on=False)
        self._open.remove(number)
        if found.mine:
            if clip is not None:
                link.factors[number] = shrink(self._norm(number, found, clip[0]), clip[1])
            self._close(number, found, read=False)
            link.factors.pop(number, None)
        else:
            for sent in link.everywhere(number, AwaitStep(Index(number), found.step)):
                link.wait(
                    sent, f"optimizer.step {found.step}", ListNotArrived(Index(number), found.step)
                )
            self._rows.go(number, found.step)

    def _norm_of_step(self, number: int, kind: float, limit: float, *, may_go_on: bool) -> float:
        """Return the norm of the gradients that make the step; of mine, where I go on before
        that.
        """
        found = self._decide(number, may_go_on=may_go_on)
        if not found.is_open:
            return self._norm(number, found, kind)
        self._clips[number] = kind, limit
        return self._link.norm([number], kind)

    def _follow(self) -> None:
        """Wait where I am too far ahead of the slowest, and then read what I waited for."""
        link, sample_queue = self._link, self.sample_queue
        known = min(self._known.get(number, 0) for number in range(len(link.optimizers)))
        if sample_queue.clock - known <= self._bound:
            return
        steps = sample_queue.go()
        link.context.agreement.retry_after_losses(lambda: link.catch_up(steps))
        for number, step in steps.items():
            self._rows.go(number, step)
        self._known = dict.fromkeys(
            range(len(link.optimizers)), sample_queue.clock - int(self._bound)
        )


class BackupWorkers(ScheduledSteps):
    """Backup workers: the first to arrive make a step, all but so many `backups`.

    Gradients that come later are dropped.
    """

    def __init__(self, link: ServerLink, rows: PerWorkerRowSteps, *, backups: int) -> None:
        super().__init__(link, rows)
        self._backups = backups

    def _gradient(self, number: int) -> int:
        """Return the number of the step: a gradient that is late for one is in no later one."""
        return self._link.steps_taken[number] + 1

    def _ask(self, number: int, *, may_go_on: bool) -> StepAssignment:
        step = self._gradient(number)
        return self._call(
            number, step, step, partial(ArriveAtStep, Index(number), step, self._backups)
        )

    def _weigh(self, found: StepAssignment) -> tuple[float, float, bool]:
        return found.parts, 1.0, False

    def _skip(self, number: int, step: int) -> None:
        link, units = self._link, self._link.units(number)
        reads = link.ask_for(units, step)
        self._late = True
        link.take_in(units, reads, stepped=False)
        link.steps_taken[number] = step
        self._rows.go(number, step)
