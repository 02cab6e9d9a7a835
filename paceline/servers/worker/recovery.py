"""The part of a consistency model that recovers from losses, in a run that survives them.

In lockstep a step is settled once all gradients are on all copies. Then it is made:

    push all | settled: all workers' pushes are on all copies | close, read by each worker

    a loss before the step is settled  nothing counts, and the samples of the turn are dealt again
    a worker is lost after that        the step is made, with the gradient that the worker pushed;
                                       the first worker to close it makes it
    a server is lost after that        its copies have everything

Out of lockstep servers have no copies, and a lost server ends the run. So the scheduler is alive in
all that follows. Each request may come twice: a worker that was interrupted by the loss of another
worker asks again. The scheduler deals the samples of a lost worker again. If the lost worker was to
make a step with other workers, they make it, with its gradient; a step that it was to make alone is
left out. So its last samples may count twice.

A copy that is started in place of a lost server is filled between two steps.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Protocol

from paceline.comm.agreement import CallDiscarded
from paceline.errors import RECOVERABLE_ERRORS, StateLost
from paceline.servers.protocol.message import Index, call_server
from paceline.servers.protocol.parameters import CloseStep
from paceline.servers.protocol.recovery import RollBackSteps, SkipStep
from paceline.servers.protocol.samples import LoseWorkers
from paceline.servers.protocol.service import CheckAlive
from paceline.servers.worker.link import ServerLink
from paceline.servers.worker.replication import ServerReplication
from paceline.servers.worker.sample_queue import SampleQueueClient


class ServerRecovery(Protocol):
    """The recovering part of a consistency model, as the rest of the package sees it."""

    @property
    def copies(self) -> ServerReplication:
        """The replication of the servers."""
        ...


class LockstepRecovery:
    """The recovering part if workers are in lockstep."""

    def __init__(self, link: ServerLink, copies: ServerReplication) -> None:
        self._link, self.copies = link, copies
        # By optimizer: the workers whose gradients make its next step, once that is settled.
        self._settled_workers: dict[int, list[int]] = {}
        self._stepped_optimizers: list[
            int
        ] = []  # optimizers that have stepped in this turn, in order

    def mark_decided(self, close: CloseStep) -> CloseStep:
        """Mark the request as one for a settled step, which is the same on all workers.

        With several optimizers the step can be undone, as the step of another one may still fail.
        """
        return replace(close, decided=True, same=True, undo=len(self._link.optimizers) > 1)

    def settle_gradients(self, number: int) -> list[int]:
        """Push the gradients of the next step, and agree that all of them are on all servers.

        Returns the workers that make the step, even if one of them is lost afterwards. Raises
        `CallDiscarded` on all workers if a loss came before.
        """
        link = self._link
        if number in self._settled_workers:
            link.push_final_gradients(number)  # raises if p.grad has been changed since
            return self._settled_workers[number]
        if link.context.step_state.exchange_closed:
            raise CallDiscarded("a worker was lost in this turn")

        def act() -> list[int]:
            link.push_final_gradients(number)
            return list(link.worker_numbers)

        self._settled_workers[number] = link.context.agreement.settle_call(
            act, "optimizer.step", apart=True
        )
        return self._settled_workers[number]

    def complete_step(self, number: int) -> None:
        """Note that an optimizer has stepped, and take in new copies.

        Collective, if any copies are being started.
        """
        self._stepped_optimizers.append(number)
        del self._settled_workers[number]
        # A copy is filled between two steps, when no push is under way.
        if self.copies.has_starting_copies:
            self._link.context.agreement.repeat_until_settled(
                self._await_arrivals, what="optimizer.step"
            )
        self.copies.fill_new_copies()

    def _await_arrivals(self) -> None:
        """Wait until this worker's pushes for other optimizers have arrived.

        A new copy is then filled with them, too.
        """
        # Messages stay in order: a server answers after it has taken in all earlier pushes.
        for caller in self._link.connections.callers:
            call_server(caller, CheckAlive(), self._link.deadline)

    def commit_turn(self) -> None:
        """Note that the turn is over."""
        self._stepped_optimizers.clear()

    def abort_turn(self) -> None:
        """Undo the turn on servers, as its samples are dealt again.

        Raises `StateLost` if one optimizer steps twice in the turn.
        """
        link, stepped = self._link, self._stepped_optimizers
        link.discard_pushes()
        self._settled_workers.clear()
        link.clip_factors.clear()
        # Servers keep what they need to undo one step, and with a single optimizer not even that.
        if len({*stepped}) < len(stepped) or (stepped and len(link.optimizers) == 1):
            raise StateLost(
                "a worker was lost in a turn in which an optimizer steps twice, and servers can "
                "undo only one step of each optimizer: resume from a checkpoint"
            )
        roll_back = RollBackSteps(tuple((index, link.steps_taken[index]) for index in stepped))
        for caller in link.connections.callers:
            with contextlib.suppress(
                *RECOVERABLE_ERRORS
            ):  # the next call notices a server that is lost now
                call_server(caller, roll_back, link.deadline)
        for index in stepped:
            link.steps_taken[index] -= 1
        self._stepped_optimizers.clear()

    def regroup(self) -> None:
        """Go on with the remaining workers and servers.

        Collective. Raises `StateLost` if no copy of a shard is left.
        """
        self.copies.agree_on_losses(self._link.context)


class QueueRecovery:
    """The recovering part if workers are not in lockstep, and take samples from a queue."""

    def __init__(
        self, link: ServerLink, copies: ServerReplication, sample_queue: SampleQueueClient
    ) -> None:
        self._link, self.copies, self._sample_queue = link, copies, sample_queue

    def regroup(self) -> None:
        """Go on after workers have changed.

        Collective. Raises `StateLost` if a server was lost.
        """
        link = self._link
        link.connections.set_cancel_scope(link.context.cancel_scope)
        # Afterwards all servers have answered a ping, so everything sent before has arrived.
        self.copies.agree_on_losses(link.context)
        link.mark_pushes_arrived()
        self._sample_queue.forget_requests()
        # One worker tells the scheduler. It may find steps that only lost workers were to make:
        # servers skip them, so that later steps don't wait for them.
        if link.context.group.rank == 0:
            lost = call_server(
                link.primaries[0], LoseWorkers(tuple(link.worker_numbers)), link.deadline
            )
            for optimizer, step in lost.steps:
                # Not waited for: an earlier step may still need the remaining workers.
                link.send_to_shards(optimizer, SkipStep(Index(optimizer), step))
            if lost.samples:
                epoch = self._sample_queue.epoch_part[0]
                link.context.announce(
                    f"{lost.samples} samples of epoch {epoch} were lost with a worker, after all "
                    "other workers had ended it"
                )
