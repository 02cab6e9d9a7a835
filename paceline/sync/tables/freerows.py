"""Sparse tables where workers are not in lockstep: their rows step with the optimizers on the servers of `ParameterServer`.

    Asynchronous      ApplyRows                           each gradient is a step of its own, as it is for everything else
    StaleSynchronous, HoldRows | decided | CloseRowStep   gradients of rows lie on all servers before it is decided which workers make
    BackupWorkers                                         a step, and the same workers step rows and everything else

A pull is answered once the last step that its worker knows of has been made (its own, if asynchronous). There may be later ones in it.
An optimizer that has nothing but tables takes part in the decision like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from paceline.comm.rpc import RpcClient
from paceline.errors import UsageError
from paceline.server.protocol import rows
from paceline.server.protocol.message import send
from paceline.sync.tables.client import TableClient, TableGradient, TableServers

if TYPE_CHECKING:
    from paceline.sync.parameterserver.link import ServerLink


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


class UnlockedRows:
    """The tables that step with a strategy's optimizers, which are known by their numbers; none before `open`."""

    def __init__(self, link: ServerLink) -> None:
        self._link = link
        self._library: TableServers | None = None
        self._owned: Callable[[Any], Sequence[OwnedTable]] = lambda optimizer: ()
        self._found: dict[int, list[TableGradient]] = {}  # by optimizer: this worker's gradients for its next step
        self._held: set[int] = set()  # optimizers whose gradients are on the servers already

    def open(self, library: TableServers, owned: Callable[[Any], Sequence[OwnedTable]], optimizers: Sequence[Any]) -> None:
        """Step these optimizers' tables from now on; `owned` returns the tables of an optimizer. Called again when there are more."""
        link = self._link
        self._library, self._owned = library, owned
        library.free = "alone" if link.alone else "together"
        library.wires.follow(link.context.cancel_scope)
        for optimizer in optimizers:
            if owned(optimizer) and all(known is not optimizer for known in link.optimizers):
                link.optimizers.append(optimizer)
                link.steps_taken.append(0)
        for optimizer, steps in zip(link.optimizers, link.steps_taken, strict=True):
            late = [table.lookup.name for table in owned(optimizer) if not table.lookup.steps]
            if steps and late:
                raise UsageError(
                    f"the sparse table {late[0]} has come to an optimizer that has stepped already, and with staleness or backup_workers "
                    "servers can't tell where it stands: prepare all tables of an optimizer before it steps"
                )

    def has(self, optimizer: Any) -> bool:
        """Whether this optimizer steps any table."""
        return bool(self._owned(optimizer))

    def _tables(self, number: int) -> Sequence[OwnedTable]:
        return self._owned(self._link.optimizers[number])

    # ---- what I come with

    def offer(self, optimizer: Any) -> None:
        """Take the tables' gradients for a step of the optimizer. Raises `UsageError` where others were clipped with it."""
        number = next(number for number, known in enumerate(self._link.optimizers) if known is optimizer)
        now = [table.gradient() for table in self._tables(number)]
        if number in self._held and any(_other(one, two) for one, two in zip(self._found[number], now, strict=True)):
            raise UsageError(
                "a sparse table has other gradients than at run.clip, by which servers had been told of them: call backward before that"
            )
        self._found[number] = now

    def hold(self, number: int) -> None:
        """Make sure that my gradients for the next step of this optimizer are on all servers."""
        tables, library = self._tables(number), self._library
        if not tables or library is None or number in self._held:
            return
        self._found[number] = self._found.get(number) or [table.gradient() for table in tables]
        after = tables[0].lookup.steps
        for sent in library.spread(self._steps(number, tables), lambda gradients: rows.HoldRows(gradients, after)):
            library.wait(sent)
        self._held.add(number)

    def _steps(self, number: int, tables: Sequence[OwnedTable]) -> list[tuple[TableClient, TableGradient, dict[str, Any]]]:
        found = self._found[number]
        return [(table.lookup, gradient, table.settings) for table, gradient in zip(tables, found, strict=True)]

    # ---- steps

    def apply(self, number: int) -> list[tuple[RpcClient, int]]:
        """Make a step with my gradients alone, by my part of the learning rate; return the messages."""
        tables, library, part = self._tables(number), self._library, self._link.context.step_state.share_of_step
        if not tables or library is None:
            return []
        factor = 1.0 / part if part else 0.0
        sent = library.spread(self._steps(number, tables), lambda gradients: rows.ApplyRows(gradients, factor, part))
        del self._found[number]
        for table in tables:
            table.lookup.advance()
        return [(one.caller, one.number) for one in sent]

    def close(self, number: int, step: int, found: Mapping[str, Any], part: float) -> list[tuple[RpcClient, int]]:
        """Let the `found` workers make this step, with the mean of their gradients, by `part` of the learning rate."""
        tables, library, seconds = self._tables(number), self._library, self._link.seconds
        if not tables or library is None:
            return []
        numbers = tuple(table.lookup.number for table in tables)
        request = rows.CloseRowStep(numbers, step, tuple(found["workers"]), 1.0 / found["parts"], part)
        sent = [send(caller, request, seconds) for caller in library.wires.callers]
        self.go(number, step)
        return [(one.caller, one.number) for one in sent]

    def go(self, number: int, step: int) -> None:
        """Go on from this step of an optimizer. What I had given is in it, or in a later one, or discarded."""
        if number in self._held:  # else it has been offered for a step that is still to come
            self._held.remove(number)
            del self._found[number]
        for table in self._tables(number):
            table.lookup.advance(max(step, table.lookup.steps))


def _other(one: TableGradient, two: TableGradient) -> bool:
    return one.used != two.used or (one.values is not two.values and bool(len(one.ids) or len(two.ids)))
