"""In lockstep, where losses are survived: a step is settled once the gradients of all are where they have to be, and is made then.

    push all  |  settled: all workers' pushes are on all copies  |  close, read       by each worker; the first to close makes the step
      a worker is lost here: none of it counts,                     lost here: the step is made, with what
      the turn is dealt again                                       the lost one had pushed
      a server is lost here: the same                               lost here: its copies have all of it

A copy that was lost is started anew in the background, and is given what the others have between two steps.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.comm.agreement import CallDiscarded
from paceline.errors import LOSSES, StateLost
from paceline.server import optimizers
from paceline.sync.parameterserver.renewal import renew
from paceline.sync.parameterserver.replication import ServerReplication

if TYPE_CHECKING:
    from paceline.sync.parameterserver.client import ParameterServerSync


class ElasticBulkSynchronous:
    """Bulk synchronous, where losses are survived."""

    free = drops = False

    copies: ServerReplication

    def __init__(self, client: ParameterServerSync) -> None:
        self._client = client
        self._makers: dict[int, list[int]] = {}  # by optimizer: the workers whose gradients make its next step, once that is settled
        self._made: list[int] = []  # the optimizers that have stepped in this turn

    # ---- a step

    def begin(self) -> None: ...

    def weight(self, part: float) -> float:
        return part

    def pushing(self, number: int) -> None: ...

    def _settle(self, number: int) -> None:
        """What this step is made of is on all servers, for all workers. Raises `CallDiscarded`, on all, if that can't be any more."""
        client = self._client
        if number in self._makers:
            client.settle(number)  # raises if p.grad has been changed since
            return
        if client.context.step_state.exchange_closed:
            raise CallDiscarded("a worker was lost in this turn")

        def act() -> list[int]:
            client.settle(number)
            return list(client.workers)

        self._makers[number] = client.context.agreement.settle(act, "optimizer.step", apart=True)

    def step(self, number: int) -> None:
        """See `Consistency`. Raises `CallDiscarded` where the turn comes again."""
        client = self._client
        self._settle(number)
        parcels = client.units(number)
        settings, step = optimizers.settings(client.optimizers[number]), client.steps_taken[number] + 1
        body = {"workers": self._makers[number], "factor": client.factors.get(number, 1.0), "settings": list(enumerate(settings))}
        body |= {"decided": True, "same": True, "undo": len(client.optimizers) > 1}  # another may fail in the same turn

        def act() -> None:
            closes = client.everywhere("close", number, step, body)
            reads = client.ask_for(parcels, step)
            for caller, message in closes:
                caller.wait(message, client.seconds)
            client.take_in(parcels, reads)

        client.context.agreement.repeat(act, what="optimizer.step")
        self._made.append(number)
        del self._makers[number]
        client.factors.pop(number, None)
        client.steps_taken[number] = step
        if self.copies.waits:
            client.context.agreement.repeat(self._quieten, what="optimizer.step")
        renew(self.copies)

    def _quieten(self) -> None:
        """What I have pushed for other optimizers has come, too: who is given what servers have, has that then."""
        for caller in self._client.wires.callers:
            caller.call("alive", seconds=self._client.seconds)  # answered after it

    def norms(self, numbers: Sequence[int], kind: float, limit: float) -> list[float]:
        """See `Consistency`. Raises `CallDiscarded` where the turn comes again."""
        client = self._client
        for number in numbers:
            self._settle(number)

        def act() -> list[float]:
            asked = []
            for number in numbers:
                body = {"workers": self._makers[number], "kind": None if kind == math.inf else kind, "decided": True}
                asked += client.everywhere("norm", number, client.steps_taken[number] + 1, body, ask=True)
            return [float(caller.wait(message, client.seconds).body["norm"]) for caller, message in asked]

        return client.context.agreement.repeat(act, what="run.clip")

    def commit(self) -> None:
        self._made.clear()

    def abort(self) -> None:
        """The turn comes again: nothing of it has happened on servers. Raises `StateLost` where one optimizer steps twice in it."""
        client, made = self._client, self._made
        self._makers.clear()
        client.factors.clear()
        if len({*made}) < len(made) or (made and len(client.optimizers) == 1):
            raise StateLost(
                "a worker was lost in a turn in which an optimizer steps twice, and servers go back by one step of each alone: resume from "
                "a checkpoint"
            )
        back = [[number, client.steps_taken[number]] for number in made]
        for caller in client.wires.callers:
            with contextlib.suppress(*LOSSES):  # one that is lost now shows it in the next call
                caller.call("back", body={"steps": back}, seconds=client.seconds)
        for number in made:
            client.steps_taken[number] -= 1
            client.wrapper.unlearn(client.units(number))
        self._made.clear()

    # ---- other workers, other servers

    def regroup(self) -> None:
        """The workers are others, or servers were lost. Collective. Raises `StateLost` where nobody has a shard any more."""
        self.copies.survey(self._client.context)
