"""The additional part of a consistency model in a run that survives losses.

In lockstep a step is settled once all gradients are on all copies, and is made then:

    push all | settled: all workers' pushes are on all copies | close, read by each worker

    a loss before this is settled      nothing counts, and the turn is dealt again
    a worker is lost after it          the step is made, with the gradient that the worker pushed;
                                       the first to close makes it
    a server is lost after it          its copies have everything

Out of lockstep servers have no copies, and a lost server ends the run. So the scheduler lives, and
each request may come twice: a worker that was interrupted by the loss of another asks again. The
scheduler deals the samples of a lost worker again. If it was to make a step with others, they make
it, with its gradient; a step that it was to make alone is left out. So its last samples may count
twice.

A copy that is started in place of a lost server gets the state of the others between two steps.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Protocol

from paceline.comm.agreement import CallDiscarded
from paceline.errors import LOSSES, StateLost
from paceline.servers.protocol.message import Index, call
from paceline.servers.protocol.parameters import CloseStep
from paceline.servers.protocol.recovery import RollBackSteps, SkipStep
from paceline.servers.protocol.samples import LoseWorkers
from paceline.servers.protocol.service import CheckAlive
from paceline.servers.worker.link import ServerLink
from paceline.servers.worker.replication import ServerReplication
from paceline.servers.worker.sample_queue import SampleQueueClient


class ServerRecovery(Protocol):
    """The recovering part of a consistency model, as others see it."""

    @property
    def copies(self) -> ServerReplication:
        """The replication of the servers."""
        ...


class LockstepRecovery:
    """The recovering part where workers are in lockstep."""

    def __init__(self, link: ServerLink, copies: ServerReplication) -> None:
        self._link, self.copies = link, copies
        # by optimizer: the workers whose gradients make its next step, once that is settled
        self._makers: dict[int, list[int]] = {}
        self._made: list[int] = []  # the optimizers that have stepped in this turn

    def decided(self, close: CloseStep) -> CloseStep:
        """Terms on which a decided step is closed: alike on all workers.

        It can be undone while the step of another optimizer may still fail.
        """
        return replace(close, decided=True, same=True, undo=len(self._link.optimizers) > 1)

    def settle(self, number: int) -> list[int]:
        """Make sure that all gradients of the next step are on all servers, whoever is lost then;
        return the workers that make it.

        Raises `CallDiscarded`, on all, if they can't be any more.
        """
        link = self._link
        if number in self._makers:
            link.settle(number)  # raises if p.grad has been changed since
            return self._makers[number]
        if link.context.step_state.exchange_closed:
            raise CallDiscarded("a worker was lost in this turn")

        def act() -> list[int]:
            link.settle(number)
            return list(link.workers)

        self._makers[number] = link.context.agreement.settle_call(act, "optimizer.step", apart=True)
        return self._makers[number]

    def stepped(self, number: int) -> None:
        """Note that an optimizer has stepped, and take in copies that have begun.

        Collective, if any are being started.
        """
        self._made.append(number)
        del self._makers[number]
        if self.copies.waits:
            self._link.context.agreement.repeat_until_settled(self._quieten, what="optimizer.step")
        self.copies.renew()

    def _quieten(self) -> None:
        """Wait until my pushes for other optimizers have arrived, too, so that a new copy is
        filled with them.
        """
        for caller in self._link.connections.callers:
            call(caller, CheckAlive(), self._link.seconds)  # answered after it

    def commit(self) -> None:
        """Note that the turn is over."""
        self._made.clear()

    def abort(self) -> None:
        """Undo the turn on servers, as it is dealt again.

        Raises `StateLost` where one optimizer steps twice in it.
        """
        link, made = self._link, self._made
        link.release()
        self._makers.clear()
        link.factors.clear()
        if len({*made}) < len(made) or (made and len(link.optimizers) == 1):
            raise StateLost(
                "a worker was lost in a turn in which an optimizer steps twice, and servers go "
                "back by one step of each alone: resume from a checkpoint"
            )
        back = RollBackSteps(tuple((number, link.steps_taken[number]) for number in made))
        for caller in link.connections.callers:
            with contextlib.suppress(*LOSSES):  # one that is lost now shows it in the next call
                call(caller, back, link.seconds)
        for number in made:
            link.steps_taken[number] -= 1
        self._made.clear()

    def regroup(self) -> None:
        """Go on with the workers and servers that are left.

        Collective. Raises `StateLost` where no copy of a shard is left.
        """
        self.copies.survey(self._link.context)


class QueueRecovery:
    """The recovering part where workers are not in lockstep, and take their samples from a
    queue.
    """

    def __init__(
        self, link: ServerLink, copies: ServerReplication, sample_queue: SampleQueueClient
    ) -> None:
        self._link, self.copies, self._sample_queue = link, copies, sample_queue

    def regroup(self) -> None:
        """Go on after workers have changed.

        Collective. Raises `StateLost` where a server was lost.
        """
        link = self._link
        link.connections.follow(link.context.cancel_scope)
        self.copies.survey(link.context)  # all that I have sent has arrived
        link.arrived()
        self._sample_queue.resume()
        if link.context.group.rank == 0:
            lost = call(link.callers[0], LoseWorkers(tuple(link.workers)), link.seconds)
            for optimizer, step in lost.steps:
                # it may have to wait for steps of the living
                link.everywhere(optimizer, SkipStep(Index(optimizer), step))
            if lost.samples:
                epoch = self._sample_queue.part[0]
                link.context.announce(
                    f"{lost.samples} samples of epoch {epoch} were lost with a worker, when all "
                    "others had ended it"
                )
