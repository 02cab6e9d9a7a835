"""What a consistency model needs where workers and servers may be lost. Where nothing can be lost, it isn't there.

In lockstep a step is settled once the gradients of all are where they have to be, and is made then:

    push all  |  settled: all workers' pushes are on all copies  |  close, read       by each worker; the first to close makes the step
      a worker is lost here: none of it counts,                     lost here: the step is made, with what
      the turn is dealt again                                       the lost one had pushed
      a server is lost here: the same                               lost here: its copies have all of it

Where workers are not in lockstep, a loss is a meeting of all the living, after which everything goes on:

    push to all copies, acknowledged  |  who makes step n: the scheduler  |  close n on all copies, acknowledged  |  read
      a loss here: pushed again            a loss here: pushed again          a loss here: n was made if any server   here: n was made
                                                                              that lives has made it

A worker goes on from a step once all servers have made it, so what a lost server alone had made nobody has built on. In the meeting

    workers say     their clock, the pieces that they have taken      servers say     the steps that they have made
    the first       has each server make the steps that another has made; what was pushed beyond is discarded on all of them; the
                    scheduler, on whichever server is first now, is told where all are (`reconcile`), and what no step has is dealt again
    each worker     knows then whether its gradient is in a step, and pushes it again if it isn't: nothing is computed twice

A copy that was started in the place of a lost server is given what the others have between two steps, or in such a meeting.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

import msgpack

from paceline.comm.agreement import CallDiscarded
from paceline.comm.rpc import RpcClient
from paceline.errors import LOSSES, StateLost
from paceline.server.journal import load_closes, merged
from paceline.server.protocol.message import Index, R, Request, call, send
from paceline.server.protocol.parameters import AwaitStep, CloseStep
from paceline.server.protocol.recovery import DiscardPushes, DropSamples, FenceWorkers, ReadClosedSteps, RollBackSteps
from paceline.server.protocol.samples import ResumeSchedule
from paceline.server.protocol.service import CheckAlive
from paceline.server.reconcile import WorkerReport, latest, stand
from paceline.sync.parameterserver.link import ServerLink
from paceline.sync.parameterserver.replication import ServerReplication
from paceline.sync.parameterserver.sample_queue import SampleQueueClient
from paceline.sync.parameterserver.units import packed


class ServerRecovery(Protocol):
    """The recovering part of a consistency model, as others see it."""

    @property
    def copies(self) -> ServerReplication:
        """The replication of the servers."""
        ...

    def take_begun(self) -> list[str]:
        """Return the names of the copies that have begun in a meeting since the last call."""
        ...


class LockstepRecovery:
    """The recovering part where workers are in lockstep."""

    def __init__(self, link: ServerLink, copies: ServerReplication) -> None:
        self._link, self.copies = link, copies
        self._makers: dict[int, list[int]] = {}  # by optimizer: the workers whose gradients make its next step, once that is settled
        self._made: list[int] = []  # the optimizers that have stepped in this turn

    def decided(self, close: CloseStep) -> CloseStep:
        """Return how a step is closed that is decided: alike by all workers, and to be undone while that of another optimizer may fail."""
        return replace(close, decided=True, same=True, undo=len(self._link.optimizers) > 1)

    def settle(self, number: int) -> list[int]:
        """Make sure that all gradients of the next step are on all servers, whoever is lost then; return the workers that make it.

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

        self._makers[number] = link.context.agreement.settle(act, "optimizer.step", apart=True)
        return self._makers[number]

    def stepped(self, number: int) -> None:
        """Note that an optimizer has stepped, and take in copies that have begun. Collective, if any are being started."""
        self._made.append(number)
        del self._makers[number]
        if self.copies.waits:
            self._link.context.agreement.repeat(self._quieten, what="optimizer.step")
        self.copies.renew()

    def _quieten(self) -> None:
        """Wait until my pushes for other optimizers have arrived, too, so that a new copy is filled with them."""
        for caller in self._link.connections.callers:
            call(caller, CheckAlive(), self._link.seconds)  # answered after it

    def commit(self) -> None:
        """Note that the turn is over."""
        self._made.clear()

    def abort(self) -> None:
        """Undo the turn on servers, as it is dealt again. Raises `StateLost` where one optimizer steps twice in it."""
        link, made = self._link, self._made
        link.release()
        self._makers.clear()
        link.factors.clear()
        if len({*made}) < len(made) or (made and len(link.optimizers) == 1):
            raise StateLost(
                "a worker was lost in a turn in which an optimizer steps twice, and servers go back by one step of each alone: resume from "
                "a checkpoint"
            )
        back = RollBackSteps(tuple((number, link.steps_taken[number]) for number in made))
        for caller in link.connections.callers:
            with contextlib.suppress(*LOSSES):  # one that is lost now shows it in the next call
                call(caller, back, link.seconds)
        for number in made:
            link.steps_taken[number] -= 1
        self._made.clear()

    def regroup(self) -> None:
        """Go on with the workers and servers that are left. Collective. Raises `StateLost` where no copy of a shard is left."""
        self.copies.survey(self._link.context)

    def take_begun(self) -> list[str]:
        return []  # nobody came together for them


class QueueRecovery:
    """The recovering part where workers are not in lockstep, and take their samples from a queue."""

    def __init__(self, link: ServerLink, copies: ServerReplication, sample_queue: SampleQueueClient) -> None:
        self._link, self.copies, self._sample_queue = link, copies, sample_queue
        self._begun: list[str] = []  # copies that have begun, as they are called
        self._counted: dict[int, int] = {}  # by optimizer: my last gradient that was in a step when somebody was lost last
        self._made: list[int] = []  # by optimizer: the steps that had been made then

    # ---- a step

    def made(self, number: int, gradient: int) -> int | None:
        """Return the last step of an optimizer, if this gradient of mine was in one at the last loss; else None."""
        return self._made[number] if self._counted.get(number, 0) >= gradient else None

    def skip(self, number: int, step: int) -> bool:
        """Wait until all copies have made a step that I was too late for; return whether its samples are left out of all steps.

        Servers write those down as dropped.
        """
        link, pieces = self._link, self._sample_queue.pieces()
        for sent in link.everywhere(number, AwaitStep(Index(number), step)):
            sent.wait(link.seconds)
        if pieces:
            self._tell_all(DropSamples(self._sample_queue.part[0], tuple((batch, start, stop) for batch, start, stop in pieces)))
        return bool(pieces)

    def has_begun(self) -> bool:
        """Whether a copy that I start has begun, and is to be taken in."""
        return self.copies.waits and bool(self.copies.begun())

    # ---- losses

    def regroup(self) -> None:
        """Go on after workers have changed, servers were lost, or copies have begun. Collective; may begin anew at any place.

        Raises `StateLost` where no copy of a shard is left.
        """
        link, group = self._link, self._link.context.group
        link.connections.follow(link.context.cancel_scope)
        link.release()
        link.factors.clear()
        self.copies.survey(link.context)
        mine = {"report": asdict(self._sample_queue.report()), "begun": self.copies.begun()}
        answers = [json.loads(body) for body in group.agree(json.dumps(mine).encode())]
        begun = [found for each in answers for found in each["begun"]]
        reports = {worker: WorkerReport.load(each["report"]) for worker, each in zip(link.workers, answers, strict=True)}
        first = next(rank for rank, worker in enumerate(link.workers) if (reports[worker].part, reports[worker].times) == latest(reports))
        body = msgpack.packb(self._settle(reports, begun)) if group.rank == first else b""
        found = msgpack.unpackb(group.agree(body)[first], strict_map_key=False)
        self._made, gradients, filled, clocks, nobodys = found
        self._begun += self.copies.take_in(begun, filled)
        me = self.copies.me
        self._counted = {optimizer: numbers.get(me, 0) for optimizer, numbers in enumerate(gradients)}
        self._sample_queue.resume(clocks[me])
        if nobodys and group.rank == 0:
            link.context.announce(
                f"{nobodys} samples of epoch {self._sample_queue.part[0]} were lost with a worker, when all others had ended it"
            )

    def _settle(self, reports: Mapping[int, WorkerReport], begun: Sequence[Any]) -> list[Any]:
        """Bring all servers to the same steps, and the scheduler to where workers are.

        Returns steps, gradients, the copies that were filled, clocks, and how many samples nobody will take.
        """
        link = self._link
        heads = self._tell_all(FenceWorkers(tuple(link.workers)))
        steps = {caller: head.steps for caller, head in heads.items()}
        for optimizer in range(len(link.optimizers)):
            self._even(optimizer, steps)
        ledgers = self._tell_all(DiscardPushes())
        journal = merged(ledgers[caller].packed.numpy().tobytes() for caller in link.callers)
        made = [max(found[optimizer] for found in steps.values()) for optimizer in range(len(link.optimizers))]
        standing = stand(reports, self._sample_queue.sizes, journal, made, gathers=not link.drops)
        call(link.callers[0], ResumeSchedule(packed(standing.dump())), link.seconds)
        filled = self.copies.fill(begun)
        return [made, standing.gradients, filled, standing.clocks, standing.nobodys]

    def _tell_all(self, request: Request[R]) -> dict[RpcClient, R]:
        seconds = self._link.seconds
        sent = [send(caller, request, seconds) for caller in self._link.connections.callers]
        return {one.caller: one.wait(seconds) for one in sent}

    def _even(self, optimizer: int, steps: Mapping[RpcClient, Sequence[int]]) -> None:
        """Let each server that keeps parameters of an optimizer make the steps that another has made."""
        link = self._link
        shards = {unit.server for unit in link.units(optimizer)}
        callers = [caller for shard in shards for caller in link.connections.of[shard]]
        ahead = max(callers, key=lambda caller: steps[caller][optimizer])
        for caller in callers:
            lacks = steps[caller][optimizer]
            if lacks == steps[ahead][optimizer]:
                continue
            closed = call(ahead, ReadClosedSteps(Index(optimizer), lacks), link.seconds)
            for close in load_closes(closed.packed.numpy().tobytes()):
                call(caller, close, link.seconds)

    def take_begun(self) -> list[str]:
        found, self._begun = self._begun, []
        return found
