"""Steps of sparse tables for workers out of lockstep, and for runs that survive losses.

`TableServers.give` is not enough for them.

`PerWorkerRowSteps`: rows step with the optimizers on the servers of `ParameterServer`.

    Asynchronous       ApplyRows: each gradient is a step of its own, as for all other parameters
    StaleSynchronous,  HoldRows | decided | CloseRowStep: gradients of rows lie on all servers
    BackupWorkers      before the workers of a step are chosen; the same workers step rows and all
                       other parameters

A pull is answered once the last step that its worker knows of has been made (its own, if
asynchronous). Later steps may be in the answer. An optimizer that has only tables takes part in the
decision like any other.

`LockstepRowSteps`: all gradients are on all copies before a step is made, on all workers or on
none.

    give to all copies | settled: all gradients are on all copies | the dense part steps | make

    a worker or server is lost before it is settled    nothing counts, the turn is dealt again
    ... while the dense part steps                     the same, if it can be undone
    ... while the step is made                         it is made: each remaining worker asks for it

The dense part steps between the two, as it may be the part that fails. If a turn is dealt again
after a step of it was made (by one of two optimizers), that step is undone on the servers, too.
Rows are read from a copy if their primary is lost, without any wait for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from paceline.comm.agreement import CallDiscarded
from paceline.comm.rpc import RpcClient
from paceline.errors import LOSSES, UsageError
from paceline.servers.process.endpoints import ServerPool
from paceline.servers.protocol import rows
from paceline.servers.protocol.message import Acknowledged, Request, SentRequest, call, send
from paceline.servers.protocol.samples import StepAssignment
from paceline.servers.tables.client import Step, TableClient, TableGradient, TableServers
from paceline.servers.worker.connections import ServerTraffic
from paceline.servers.worker.replication import ServerReplication
from paceline.sync.context import SyncContext

if TYPE_CHECKING:
    from paceline.servers.worker.link import ServerLink


class OwnedTable(Protocol):
    """A table that an optimizer steps."""

    lookup: TableClient

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the table's parameter group as they are now."""
        ...

    def gradient(self) -> TableGradient:
        """Return this worker's gradient for the next step."""
        ...


class PerWorkerRowSteps:
    """The tables that step with a strategy's optimizers, which are known by their numbers; none
    before `open`.
    """

    def __init__(self, link: ServerLink) -> None:
        self._link = link
        self._library: TableServers | None = None
        self._owned: Callable[[Any], Sequence[OwnedTable]] = lambda optimizer: ()
        # by optimizer: this worker's gradients for its next step
        self._found: dict[int, list[TableGradient]] = {}
        self._held: set[int] = set()  # optimizers whose gradients are on the servers already

    def open(
        self,
        library: TableServers,
        owned: Callable[[Any], Sequence[OwnedTable]],
        optimizers: Sequence[Any],
    ) -> None:
        """Step these optimizers' tables from now on; `owned` returns the tables of an optimizer.

        Called again when there are more.
        """
        link = self._link
        self._library, self._owned = library, owned
        library.unlock(alone=link.alone)
        library.wires.follow(link.context.cancel_scope)
        for optimizer in optimizers:
            if owned(optimizer) and all(known is not optimizer for known in link.optimizers):
                link.optimizers.append(optimizer)
                link.steps_taken.append(0)
        for optimizer, steps in zip(link.optimizers, link.steps_taken, strict=True):
            late = [table.lookup.name for table in owned(optimizer) if not table.lookup.steps]
            if steps and late:
                raise UsageError(
                    f"the sparse table {late[0]} has come to an optimizer that has stepped "
                    "already, and with staleness or backup_workers "
                    "servers can't tell where it stands: "
                    "prepare all tables of an optimizer before it steps"
                )

    def has(self, optimizer: Any) -> bool:
        """Whether this optimizer steps any table."""
        return bool(self._owned(optimizer))

    def _tables(self, number: int) -> Sequence[OwnedTable]:
        return self._owned(self._link.optimizers[number])

    # ---- what I come with

    def offer(self, optimizer: Any) -> None:
        """Take the tables' gradients for a step of the optimizer.

        Raises `UsageError` where others were clipped with it.
        """
        number = next(
            number for number, known in enumerate(self._link.optimizers) if known is optimizer
        )
        now = [table.gradient() for table in self._tables(number)]
        if number in self._held and any(
            _other(one, two) for one, two in zip(self._found[number], now, strict=True)
        ):
            raise UsageError(
                "a sparse table has other gradients than at run.clip, by which servers had been "
                "told of them: call backward before that"
            )
        self._found[number] = now

    def hold(self, number: int) -> None:
        """Make sure that my gradients for the next step of this optimizer are on all servers."""
        tables, library = self._tables(number), self._library
        if not tables or library is None or number in self._held:
            return
        self._found[number] = self._found.get(number) or [table.gradient() for table in tables]
        after = tables[0].lookup.steps
        for sent in library.spread(
            self._steps(number, tables), lambda gradients: rows.HoldRows(gradients, after)
        ):
            library.wait(sent)
        self._held.add(number)

    def _steps(
        self, number: int, tables: Sequence[OwnedTable]
    ) -> list[tuple[TableClient, TableGradient, dict[str, Any]]]:
        found = self._found[number]
        return [
            (table.lookup, gradient, table.settings)
            for table, gradient in zip(tables, found, strict=True)
        ]

    # ---- steps

    def apply(self, number: int) -> list[SentRequest[Acknowledged]]:
        """Make a step with my gradients alone, by my part of the learning rate; return the
        requests.
        """
        tables, library, part = (
            self._tables(number),
            self._library,
            self._link.context.step_state.share_of_step,
        )
        if not tables or library is None:
            return []
        factor = 1.0 / part if part else 0.0
        sent = library.spread(
            self._steps(number, tables), lambda gradients: rows.ApplyRows(gradients, factor, part)
        )
        del self._found[number]
        for table in tables:
            table.lookup.advance()
        return sent

    def close(
        self, number: int, step: int, found: StepAssignment, part: float
    ) -> list[SentRequest[Acknowledged]]:
        """Let the `found` workers make this step, with the mean of their gradients, by `part` of
        the learning rate.
        """
        tables, library, seconds = self._tables(number), self._library, self._link.seconds
        if not tables or library is None:
            return []
        numbers = tuple(table.lookup.number for table in tables)
        request = rows.CloseRowStep(numbers, step, found.workers, 1.0 / found.parts, part)
        sent = [send(caller, request, seconds) for caller in library.wires.callers]
        self.go(number, step)
        return sent

    def go(self, number: int, step: int) -> None:
        """Go on from this step of an optimizer.

        What I had given is in it, or in a later one, or discarded.
        """
        if number in self._held:  # else it has been offered for a step that is still to come
            self._held.remove(number)
            del self._found[number]
        for table in self._tables(number):
            table.lookup.advance(max(step, table.lookup.steps))


class LockstepRowSteps:
    """Steps of all tables of a run, and replacement of their servers. `pool` starts servers."""

    def __init__(self, library: TableServers, pool: ServerPool) -> None:
        self._library = library
        self.copies = ServerReplication(
            library.context,
            pool,
            library.wires,
            library.replicas,
            fill=self._fill,
            kind="table server",
        )
        self._workers: list[int] = []  # the workers whose gradients make the next step
        # by number of a table: how many steps it had taken when the turn began, if it has stepped
        # since
        self._floors: dict[int, int] = {}
        self.within = False  # a turn of training is under way

    # ---- a step

    def settle(self, found: Sequence[Step]) -> None:
        """Send all servers what the next step of these tables is made of.

        Raises `CallDiscarded`, on all workers, if it can't be made.
        """
        library, agreement = self._library, self._library.context.agreement
        if library.context.step_state.exchange_closed:
            raise CallDiscarded("a worker was lost in this turn")

        def act() -> list[int]:
            for sent in library.spread(
                found, lambda gradients: rows.PushRows(gradients, (), decided=True)
            ):
                library.wait(sent)
            return list(agreement.origins)

        self._workers = agreement.settle_call(act, "optimizer.step", apart=True)

    def make(self, tables: Sequence[TableClient]) -> None:
        """Make the step that was settled."""
        if not self.within:
            self._floors.clear()
        steps = []
        for lookup in tables:
            floor = self._floors.setdefault(lookup.number, lookup.steps)
            steps.append(rows.DecidedRowStep(lookup.number, lookup.steps + 1, floor))
        self._everywhere(
            rows.MakeRowSteps(
                tuple(steps), tuple(self._workers), self._library.context.agreement.calls
            )
        )
        for lookup in tables:
            lookup.advance()

    def _everywhere(self, request: Request[Acknowledged]) -> None:
        """Send to all servers.

        A lost one shows in the next collective call, or when no other copy can answer.
        """
        library, sent = self._library, list[SentRequest[Acknowledged]]()

        def act() -> None:
            for caller in library.wires.callers:
                with contextlib.suppress(*LOSSES):
                    sent.append(send(caller, request, library.context.deadline))
            for each in sent:
                with contextlib.suppress(*LOSSES):
                    library.wait(each)

        library.context.agreement.wait_for_some(act, "optimizer.step")

    def begin(self) -> None:
        """Begin a turn."""
        self.within = True
        self._floors.clear()

    def commit(self) -> None:
        """End a turn, and take in copies of servers that have begun.

        Collective, if any are being started.
        """
        self.within = False
        self._floors.clear()
        self.copies.renew()

    def back(self) -> None:
        """Undo the turn on the servers, as it is dealt again."""
        library, floors = self._library, self._floors
        if floors:
            self._everywhere(
                rows.RollBackRows(tuple(floors.items()), library.context.agreement.calls)
            )
        for lookup in library.tables:
            lookup.discard_ahead(floors.get(lookup.number))
        for caller in library.wires.callers:
            caller.forget_messages()
        floors.clear()

    # ---- other workers, other servers

    def layout(self) -> Any:
        """Facts that a joining worker needs, as JSON values."""
        return {
            "room": self.copies.pool.join_info(),
            "tables": [[lookup.steps, lookup.spec.seed] for lookup in self._library.tables],
        }

    def regroup(self, context: SyncContext, layout: Any) -> None:
        """Go on with the context's new group of workers.

        Collective. Raises `StateLost` where no copy of a shard is left.
        """
        library = self._library
        context.extra_groups.append(ServerTraffic(library.wires))
        if layout is not None:
            self._enter(layout)
        self.copies.survey(context)
        for lookup in library.tables:
            lookup.discard_ahead()

    def _enter(self, layout: Any) -> None:
        """Go to where all workers are, as one has joined, perhaps this one."""
        library = self._library
        library.enter(self.copies.pool.join(layout["room"]))
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


def _other(one: TableGradient, two: TableGradient) -> bool:
    return one.used != two.used or (
        one.values is not two.values and bool(len(one.ids) or len(two.ids))
    )
