"""Steps of sparse tables for workers out of lockstep, and for runs that survive losses.

`TableServers.push_gradients` is for lockstep without losses alone.

`PerWorkerRowSteps`: rows step with the optimizers on the servers of `ParameterServer`.

    Asynchronous       ApplyRows: each gradient is a step of its own, as for all other parameters
    StaleSynchronous,  HoldRows | decided | CloseRowStep: gradients of rows are on all servers
    BackupWorkers      before the workers of a step are chosen; the same workers step rows and all
                       other parameters

A pull is answered after the last step that its worker knows of (its own, if asynchronous). The rows
may include later steps. An optimizer that has only tables takes part in the decision like any
other.

`LockstepRowSteps`: all gradients are on all copies before a step is made, and a step is made on all
workers or on none.

    push to all copies | settled: all gradients are on all copies | the dense part steps | make

    a worker or server is lost before it is settled    nothing counts, the turn is dealt again
    ... while the dense part steps                     the same, if it can be undone
    ... while the step is made                         it is made: each remaining worker asks for it

The dense part steps between the two, as it may fail. If the samples of a turn are dealt again after
one of two optimizers has stepped in it, that step is undone on the servers, too. If the primary of
a row is lost, the row is read from a copy at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from paceline.comm.agreement import CallDiscarded
from paceline.comm.rpc import RpcClient
from paceline.errors import RECOVERABLE_ERRORS, UsageError
from paceline.servers.process.endpoints import ServerPool
from paceline.servers.protocol import rows
from paceline.servers.protocol.message import (
    Acknowledged,
    Request,
    SentRequest,
    call_server,
    send_request,
)
from paceline.servers.protocol.samples import StepAssignment
from paceline.servers.tables.client import TableClient, TableGradient, TableServers, TableStep
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

    def take_gradient(self) -> TableGradient:
        """Merge this worker's gradients for the next step."""
        ...


class PerWorkerRowSteps:
    """Steps of the tables that belong to a strategy's optimizers, for workers out of lockstep.

    Optimizers are numbered as in `ServerLink`. There are no tables before `open_tables`.
    `_pushed_optimizers` has the optimizers whose entry in `_next_gradients` is on servers.
    """

    def __init__(self, link: ServerLink) -> None:
        self._link = link
        self._servers: TableServers | None = None
        self._get_owned_tables: Callable[[Any], Sequence[OwnedTable]] = lambda optimizer: ()
        # By optimizer: this worker's gradients for its next step, one for each table.
        self._next_gradients: dict[int, list[TableGradient]] = {}
        self._pushed_optimizers: set[int] = set()

    def open_tables(
        self,
        library: TableServers,
        owned: Callable[[Any], Sequence[OwnedTable]],
        optimizers: Sequence[Any],
    ) -> None:
        """Step the tables of these optimizers from now on. Called again for more tables.

        Args:
            library: The servers of the tables.
            owned: Returns the tables of an optimizer.
            optimizers: All optimizers of the run.
        """
        link = self._link
        self._servers, self._get_owned_tables = library, owned
        library.leave_lockstep(alone=link.is_asynchronous)
        library.connections.set_cancel_scope(link.context.cancel_scope)
        for optimizer in optimizers:
            # Optimizers of tables alone are unknown to the link, and get the next numbers.
            if owned(optimizer) and all(other is not optimizer for other in link.optimizers):
                link.optimizers.append(optimizer)
                link.steps_taken.append(0)
        for optimizer, steps in zip(link.optimizers, link.steps_taken, strict=True):
            late = [table.lookup.name for table in owned(optimizer) if not table.lookup.steps_made]
            if steps and late:
                raise UsageError(
                    f"the sparse table {late[0]} was added to an optimizer that has stepped "
                    "already, and with staleness or backup_workers servers can't tell its step: "
                    "prepare all tables of an optimizer before its first step"
                )

    def steps_tables(self, optimizer: Any) -> bool:
        """Whether this optimizer steps any table."""
        return bool(self._get_owned_tables(optimizer))

    def _get_tables(self, number: int) -> Sequence[OwnedTable]:
        return self._get_owned_tables(self._link.optimizers[number])

    # ---- gradients

    def offer_gradients(self, optimizer: Any) -> None:
        """Take the gradients of an optimizer's tables for its next step.

        Raises `UsageError` if they have changed since run.clip.
        """
        number = next(
            index for index, other in enumerate(self._link.optimizers) if other is optimizer
        )
        gradients = [table.take_gradient() for table in self._get_tables(number)]
        if number in self._pushed_optimizers and any(
            _is_different(pushed, new)
            for pushed, new in zip(self._next_gradients[number], gradients, strict=True)
        ):
            raise UsageError(
                "the gradients of a sparse table have changed since run.clip, which had sent them "
                "to servers: call backward before run.clip"
            )
        self._next_gradients[number] = gradients

    def push_gradients(self, number: int) -> None:
        """Push this worker's gradients for an optimizer's next step, unless servers have them.

        Returns when all servers have them.
        """
        tables, library = self._get_tables(number), self._servers
        if not tables or library is None or number in self._pushed_optimizers:
            return
        self._next_gradients[number] = self._next_gradients.get(number) or [
            table.take_gradient() for table in tables
        ]
        after = tables[0].lookup.steps_made
        for sent in library.send_gradients(
            self._make_table_steps(number, tables),
            lambda gradients: rows.HoldRows(gradients, after),
        ):
            library.await_answer(sent)
        self._pushed_optimizers.add(number)

    def _make_table_steps(
        self, number: int, tables: Sequence[OwnedTable]
    ) -> list[tuple[TableClient, TableGradient, dict[str, Any]]]:
        return [
            (table.lookup, gradient, table.settings)
            for table, gradient in zip(tables, self._next_gradients[number], strict=True)
        ]

    # ---- steps

    def apply_gradients(self, number: int) -> list[SentRequest[Acknowledged]]:
        """Make a step with this worker's gradients alone. Returns the requests.

        The learning rate is in proportion to the worker's share of a global batch.
        """
        tables, library, part = (
            self._get_tables(number),
            self._servers,
            self._link.context.step_state.share_of_step,
        )
        if not tables or library is None:
            return []
        # Gradients are weighted by the share already: the learning rate has it instead.
        factor = 1.0 / part if part else 0.0
        sent = library.send_gradients(
            self._make_table_steps(number, tables),
            lambda gradients: rows.ApplyRows(gradients, factor, part),
        )
        del self._next_gradients[number]
        for table in tables:
            table.lookup.advance_step()
        return sent

    def close_step(
        self, number: int, step: int, found: StepAssignment, part: float
    ) -> list[SentRequest[Acknowledged]]:
        """Make a step with the mean gradient of its workers. Returns the requests.

        Args:
            number: The optimizer.
            step: Number of the step.
            found: The scheduler's answer, with the workers of the step and their total share.
            part: Factor of the learning rate.
        """
        tables, library, seconds = self._get_tables(number), self._servers, self._link.deadline
        if not tables or library is None:
            return []
        numbers = tuple(table.lookup.number for table in tables)
        request = rows.CloseRowStep(numbers, step, found.workers, 1.0 / found.parts, part)
        sent = [send_request(caller, request, seconds) for caller in library.connections.callers]
        self.advance_tables(number, step)
        return sent

    def advance_tables(self, number: int, step: int) -> None:
        """Go on from this step of an optimizer.

        This worker's pushed gradients are in it, in a later step, or dropped.
        """
        # Gradients that were not pushed are for the next step, and stay.
        if number in self._pushed_optimizers:
            self._pushed_optimizers.remove(number)
            del self._next_gradients[number]
        for table in self._get_tables(number):
            table.lookup.advance_step(max(step, table.lookup.steps_made))


class LockstepRowSteps:
    """Steps of all tables of a run that survives losses, and replacement of their servers.

    Args:
        library: The servers.
        pool: Starts servers.
    """

    def __init__(self, library: TableServers, pool: ServerPool) -> None:
        self._servers = library
        self.copies = ServerReplication(
            library.context,
            pool,
            library.connections,
            library.replicas,
            fill=self._fill_copy,
            kind="table server",
        )
        self._settled_workers: list[int] = []  # the workers whose gradients make the next step
        # By number of a table that has stepped in this turn: its steps when the turn began.
        self._steps_at_turn_start: dict[int, int] = {}
        self.is_in_turn = False  # whether a turn of training is under way

    # ---- a step

    def settle_gradients(self, steps: Sequence[TableStep]) -> None:
        """Push the gradients of the next step, and agree that all of them are on all servers.

        Raises `CallDiscarded` on all workers if a loss came before.
        """
        library, agreement = self._servers, self._servers.context.agreement
        if library.context.step_state.exchange_closed:
            raise CallDiscarded("a worker was lost in this turn")

        def act() -> list[int]:
            for sent in library.send_gradients(
                steps, lambda gradients: rows.PushRows(gradients, (), decided=True)
            ):
                library.await_answer(sent)
            return list(agreement.origins)

        self._settled_workers = agreement.settle_call(act, "optimizer.step", apart=True)

    def make_steps(self, tables: Sequence[TableClient]) -> None:
        """Make the step that was settled."""
        if not self.is_in_turn:
            self._steps_at_turn_start.clear()
        steps = []
        for lookup in tables:
            floor = self._steps_at_turn_start.setdefault(lookup.number, lookup.steps_made)
            steps.append(rows.DecidedRowStep(lookup.number, lookup.steps_made + 1, floor))
        self._tell_all_servers(
            rows.MakeRowSteps(
                tuple(steps), tuple(self._settled_workers), self._servers.context.agreement.calls
            )
        )
        for lookup in tables:
            lookup.advance_step()

    def _tell_all_servers(self, request: Request[Acknowledged]) -> None:
        """Send a request to all servers, and wait for the answers of the ones that are alive.

        The next collective call notices a lost server.
        """
        library, all_sent = self._servers, list[SentRequest[Acknowledged]]()

        def act() -> None:
            for caller in library.connections.callers:
                with contextlib.suppress(*RECOVERABLE_ERRORS):
                    all_sent.append(send_request(caller, request, library.context.deadline))
            for sent in all_sent:
                with contextlib.suppress(*RECOVERABLE_ERRORS):
                    library.await_answer(sent)

        library.context.agreement.wait_for_some(act, "optimizer.step")

    def begin_turn(self) -> None:
        """Begin a turn."""
        self.is_in_turn = True
        self._steps_at_turn_start.clear()

    def commit_turn(self) -> None:
        """End a turn, and take in copies of servers that have begun.

        Collective, if any are being started.
        """
        self.is_in_turn = False
        self._steps_at_turn_start.clear()
        self.copies.fill_new_copies()

    def undo_turn(self) -> None:
        """Undo the turn on the servers, as its samples are dealt again."""
        library, floors = self._servers, self._steps_at_turn_start
        if floors:
            self._tell_all_servers(
                rows.RollBackRows(tuple(floors.items()), library.context.agreement.calls)
            )
        for lookup in library.tables:
            lookup.discard_prefetched(floors.get(lookup.number))
        for caller in library.connections.callers:
            caller.forget_messages()
        floors.clear()

    # ---- other workers, other servers

    def join_info(self) -> Any:
        """Facts that a joining worker needs, as JSON values."""
        return {
            "room": self.copies.pool.join_info(),
            "tables": [[lookup.steps_made, lookup.spec.seed] for lookup in self._servers.tables],
        }

    def regroup(self, context: SyncContext, layout: Any) -> None:
        """Go on with the context's new group of workers.

        Collective. Raises `StateLost` if no copy of a shard is left.
        """
        library = self._servers
        context.extra_groups.append(ServerTraffic(library.connections))
        if layout is not None:
            self._join_workers(layout)
        self.copies.agree_on_losses(context)
        for lookup in library.tables:
            lookup.discard_prefetched()

    def _join_workers(self, layout: Any) -> None:
        """Take over the servers and steps of the other workers, after a worker has joined.

        All workers call it; only the new one has anything to change.
        """
        library = self._servers
        library.use_servers(self.copies.pool.join_pool(layout["room"]))
        for lookup, (steps, seed) in zip(library.tables, layout["tables"], strict=True):
            lookup.set_position(steps, seed)

    def _fill_copy(self, shard: int, caller: RpcClient) -> Iterator[None]:
        """Fill a new copy of a shard from the present ones. Yields after each message."""
        library, seconds = self._servers, self._servers.context.deadline
        for lookup in library.tables:
            state = library.ask_shard(shard, rows.DescribeTable(lookup.number))
            call_server(
                caller, rows.CopyTable(lookup.number, shard, library.shard_count, state), seconds
            )
            yield
            for piece in lookup.read_shard(shard):
                call_server(
                    caller, rows.LoadRows(lookup.number, piece.names, piece.tensors), seconds
                )
                yield


def _is_different(one: TableGradient, two: TableGradient) -> bool:
    # Gradients are merged anew for each step, so tensors without rows may differ as objects.
    return one.used != two.used or (
        one.values is not two.values and bool(len(one.ids) or len(two.ids))
    )
