"""Steps of sparse tables where losses are survived: all gradients are on all copies before a step is made, on all workers or on none.

    give to all copies |  settled: all workers' gradients are on all copies  |  the dense part steps  |  make
      a worker or a server is lost here: none of it counts,                    the same, if it can       lost here: the step is made, as
      the turn is dealt again                                                                             each of the living says so

The dense part steps between the two, as it may be what fails. Where a turn is dealt again after a step of it was made (by one of two
optimizers), that step is undone on the servers, too. Rows are read from a copy where their primary is lost, without any wait for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.comm.agreement import CallDiscarded
from paceline.comm.rpc import RpcClient
from paceline.errors import LOSSES
from paceline.server.endpoints import ServerPool
from paceline.server.protocol import rows
from paceline.server.protocol.message import Acknowledged, Request, SentRequest, call, send
from paceline.sync.context import SyncContext
from paceline.sync.parameterserver.connections import ServerTraffic
from paceline.sync.parameterserver.renewal import renew
from paceline.sync.parameterserver.replication import ServerReplication
from paceline.sync.tables.client import Step, TableClient, TableServers


class RowSteps:
    """Steps of all tables of a run, and replacement of their servers. `pool` starts servers."""

    def __init__(self, library: TableServers, pool: ServerPool) -> None:
        self._library = library
        self.copies = ServerReplication(library.context, pool, library.wires, library.replicas, fill=self._fill, kind="table server")
        self._workers: list[int] = []  # the workers whose gradients make the next step
        self._floors: dict[int, int] = {}  # by number of a table: how many steps it had taken when the turn began, if it has stepped since
        self._me = -1 if library.waiting else library.me  # the number by which servers know this worker
        self.within = False  # a turn of training is under way

    # ---- a step

    def settle(self, found: Sequence[Step]) -> None:
        """Send all servers what the next step of these tables is made of. Raises `CallDiscarded`, on all workers, if it can't be made."""
        library, agreement = self._library, self._library.context.agreement
        if library.context.step_state.exchange_closed:
            raise CallDiscarded("a worker was lost in this turn")

        def act() -> list[int]:
            for sent in library.spread(found, lambda gradients: rows.PushRows(gradients, (), decided=True)):
                library.wait(sent)
            return list(agreement.origins)

        self._workers = agreement.settle(act, "optimizer.step", apart=True)

    def make(self, tables: Sequence[TableClient]) -> None:
        """Make the step that was settled."""
        if not self.within:
            self._floors.clear()
        steps = []
        for lookup in tables:
            floor = self._floors.setdefault(lookup.number, lookup.steps)
            steps.append(rows.DecidedRowStep(lookup.number, lookup.steps + 1, floor))
        self._everywhere(rows.MakeRowSteps(tuple(steps), tuple(self._workers), self._library.context.agreement.calls))
        for lookup in tables:
            lookup.advance()

    def _everywhere(self, request: Request[Acknowledged]) -> None:
        """Send to all servers. A lost one shows in the next collective call, or when no other copy can answer."""
        library, sent = self._library, list[SentRequest[Acknowledged]]()

        def act() -> None:
            for caller in library.wires.callers:
                with contextlib.suppress(*LOSSES):
                    sent.append(send(caller, request, library.context.deadline))
            for each in sent:
                with contextlib.suppress(*LOSSES):
                    library.wait(each)

        library.context.agreement.wait(act, "optimizer.step")

    def begin(self) -> None:
        """Begin a turn."""
        self.within = True
        self._floors.clear()

    def commit(self) -> None:
        """End a turn, and take in copies of servers that have begun. Collective, if any are being started."""
        self.within = False
        self._floors.clear()
        renew(self.copies)

    def back(self) -> None:
        """Undo the turn on the servers, as it is dealt again."""
        library, floors = self._library, self._floors
        if floors:
            self._everywhere(rows.RollBackRows(tuple(floors.items()), library.context.agreement.calls))
        for lookup in library.tables:
            lookup.steps = floors.get(lookup.number, lookup.steps)
            lookup.void()
        for caller in library.wires.callers:
            caller.forget()
        floors.clear()

    # ---- other workers, other servers

    def layout(self) -> Any:
        """Return what a joining worker has to know, as JSON values."""
        return {"room": self.copies.pool.join_info(), "tables": [[lookup.steps, lookup.spec.seed] for lookup in self._library.tables]}

    def regroup(self, context: SyncContext, layout: Any) -> None:
        """Go on with the context's new group of workers. Collective. Raises `StateLost` where no copy of a shard is left."""
        library = self._library
        context.extra_groups.append(ServerTraffic(library.wires))
        if layout is not None:
            self._enter(layout)
        self.copies.survey(context)
        for lookup in library.tables:
            lookup.void()

    def _enter(self, layout: Any) -> None:
        """Go to where all workers are, as one has joined, perhaps this one. A worker that tried to join before may have a new number."""
        library = self._library
        library.endpoints = self.copies.pool.join(layout["room"])
        if library.me != self._me:
            library.wires.close()
            library.wires.open(library.endpoints, library.me)
        else:
            library.wires.reach(library.endpoints, library.me)
        self._me, library.waiting = library.me, False
        for lookup, (steps, seed) in zip(library.tables, layout["tables"], strict=True):
            lookup.place(steps, seed)

    def _fill(self, shard: int, caller: RpcClient) -> Iterator[None]:
        library, seconds = self._library, self._library.context.deadline
        for lookup in library.tables:
            state = library.call(shard, rows.DescribeTable(lookup.number))
            call(caller, rows.CopyTable(lookup.number, shard, library.shards, state), seconds)
            yield
            for piece in lookup.pieces(shard):
                call(caller, rows.LoadRows(lookup.number, piece.names, piece.tensors), seconds)
                yield
