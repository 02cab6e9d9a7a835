"""Bulk-synchronous steps where losses are survived: a step is settled once all gradients are on all copies, and is made then.

    push all  |  settled: all workers' pushes are on all copies  |  close, read       by each worker; the first to close makes the step
      a worker is lost here: none of it counts,                     lost here: the step is made, with what
      the turn is dealt again                                       the lost one had pushed
      a server is lost here: the same                               lost here: its copies have all of it

A lost copy is started anew in the background, and is filled between two steps.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

from paceline.comm.agreement import CallDiscarded
from paceline.errors import LOSSES, StateLost
from paceline.server import optimizers
from paceline.sync.parameterserver.link import ServerLink
from paceline.sync.parameterserver.renewal import renew
from paceline.sync.parameterserver.replication import ServerReplication


class ElasticBulkSynchronous:
    """Bulk-synchronous, where losses are survived."""

    def __init__(self, link: ServerLink, copies: ServerReplication) -> None:
        self._link, self.copies = link, copies
        self._makers: dict[int, list[int]] = {}  # by optimizer: the workers whose gradients make its next step, once that is settled
        self._made: list[int] = []  # the optimizers that have stepped in this turn

    # ---- a step

    def begin(self) -> None: ...

    def pushing(self, number: int) -> None: ...

    def _settle(self, number: int) -> None:
        """Make sure that all gradients of this step are on all servers. Raises `CallDiscarded`, on all, if they can't be any more."""
        link = self._link
        if number in self._makers:
            link.settle(number)  # raises if p.grad has been changed since
            return
        if link.context.step_state.exchange_closed:
            raise CallDiscarded("a worker was lost in this turn")

        def act() -> list[int]:
            link.settle(number)
            return list(link.workers)

        self._makers[number] = link.context.agreement.settle(act, "optimizer.step", apart=True)

    def step(self, number: int) -> None:
        """Make a step of an optimizer. Raises `CallDiscarded` where the turn is dealt again."""
        link = self._link
        self._settle(number)
        units = link.units(number)
        settings, step = optimizers.settings(link.optimizers[number]), link.steps_taken[number] + 1
        body = {"workers": self._makers[number], "factor": link.factors.get(number, 1.0), "settings": list(enumerate(settings))}
        body |= {"decided": True, "same": True, "undo": len(link.optimizers) > 1}  # another may fail in the same turn

        def act() -> None:
            closes = link.everywhere("close", number, step, body)
            reads = link.ask_for(units, step)
            for caller, message in closes:
                caller.wait(message, link.seconds)
            link.take_in(units, reads)

        link.context.agreement.repeat(act, what="optimizer.step")
        self._made.append(number)
        del self._makers[number]
        link.factors.pop(number, None)
        link.steps_taken[number] = step
        if self.copies.waits:
            link.context.agreement.repeat(self._quieten, what="optimizer.step")
        renew(self.copies)

    def _quieten(self) -> None:
        """Wait until my pushes for other optimizers have arrived, too, so that a new copy is filled with them."""
        for caller in self._link.connections.callers:
            caller.call("alive", seconds=self._link.seconds)  # answered after the pushes before it

    def norms(self, numbers: Sequence[int], kind: float, limit: float) -> list[float]:
        """Return the norms of the gradients that make these steps. Raises `CallDiscarded` where the turn is dealt again."""
        link = self._link
        for number in numbers:
            self._settle(number)

        def act() -> list[float]:
            asked = []
            for number in numbers:
                body = {"workers": self._makers[number], "kind": None if kind == math.inf else kind, "decided": True}
                asked += link.everywhere("norm", number, link.steps_taken[number] + 1, body, ask=True)
            return [float(caller.wait(message, link.seconds).body["norm"]) for caller, message in asked]

        return link.context.agreement.repeat(act, what="run.clip")

    def commit(self) -> None:
        self._made.clear()

    def abort(self) -> None:
        """Undo the turn on servers, as it is dealt again. Raises `StateLost` where one optimizer steps twice in it."""
        link, made = self._link, self._made
        self._makers.clear()
        link.factors.clear()
        if len({*made}) < len(made) or (made and len(link.optimizers) == 1):
            raise StateLost(
                "a worker was lost in a turn in which an optimizer steps twice, and servers go back by one step of each alone: resume from "
                "a checkpoint"
            )
        back = [[number, link.steps_taken[number]] for number in made]
        for caller in link.connections.callers:
            with contextlib.suppress(*LOSSES):  # the loss of one shows in the next call
                caller.call("back", body={"steps": back}, seconds=link.seconds)
        for number in made:
            link.steps_taken[number] -= 1
            link.codec.unlearn(link.units(number))
        self._made.clear()

    # ---- other workers, other servers

    def regroup(self) -> None:
        """Go on with the workers and servers that are left. Collective. Raises `StateLost` where no copy of a shard is left."""
        self.copies.survey(self._link.context)
