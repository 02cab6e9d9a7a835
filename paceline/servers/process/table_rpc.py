"""The table service of a server: when each message on a sparse table is answered (`protocol.rows`
has the messages).

Workers step a table together, in lockstep; or each alone, or with those who make a step. Where
losses are survived, what was pushed makes no step by itself, but once all have decided on it.
Workers say there how many calls they have completed together (`calls`): a push of a lost worker for
a discarded turn may come after others have gone on, and does nothing then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.errors import Mismatch, UsageError
from paceline.servers.process.table import RowsBefore, TableShard, TableSpec
from paceline.servers.protocol import rows
from paceline.servers.protocol.message import Acknowledged, Handlers
from paceline.servers.protocol.rows import RowGradient

TABLES, STEPS = 1000, 1000  # on a server; of a table in a turn


class RowStep(NamedTuple):
    """A step that may be undone."""

    step: int
    calls: int  # when it was made
    before: RowsBefore


@dataclass
class ServedTable:
    """A table, with the step that it is at and the gradients for the next."""

    table: TableShard
    step: int = 0
    given: dict[int, RowGradient] = field(default_factory=dict)  # for the next step, by worker
    broken: str = ""  # why there can't be a next step
    made: list[RowStep] = field(default_factory=list)  # in the turn under way
    discarded: int = -1  # calls when a turn was discarded last
    # out of lockstep, by worker: what it has come with, and is in no step yet
    held: dict[int, RowGradient] = field(default_factory=dict)
    # out of lockstep, by worker: the steps that it has made alone
    alone: Counter[int] = field(default_factory=Counter)


class TableService:
    """The tables of one server.

    `handlers`: what is done for each request of a worker; None where the reply has to wait.
    """

    def __init__(self) -> None:
        self._shelves: dict[int, ServedTable] = {}
        self.handlers: Handlers = {
            rows.OpenTable: self._open,
            rows.PullRows: self._pull,
            rows.PushRows: self._push,
            rows.ListPushers: self._list_pushers,
            rows.MakeRowSteps: self._make,
            rows.RollBackRows: self._roll_back,
            rows.DescribeTable: self._describe,
            rows.CopyTable: self._copy,
            rows.ApplyRows: self._apply,
            rows.HoldRows: self._hold,
            rows.CloseRowStep: self._close,
            rows.DigestTable: self._digest,
            rows.ReadRows: self._read,
            rows.ClearTable: self._clear,
            rows.LoadRows: self._load,
        }

    @property
    def nbytes(self) -> int:
        """Bytes of rows in use, of their optimizer state, and of gradients for the next steps."""
        given = [
            tensor
            for shelf in self._shelves.values()
            for found in (*shelf.given.values(), *shelf.held.values())
            for tensor in (found.ids, found.grad)
        ]
        return sum(shelf.table.nbytes for shelf in self._shelves.values()) + sum(
            tensor.nbytes for tensor in given
        )

    def facts(self) -> dict[str, Any]:
        """Return the statistics for the summary: how many rows are in use."""
        return (
            {"rows": sum(len(shelf.table) for shelf in self._shelves.values())}
            if self._shelves
            else {}
        )

    def _shelf(self, number: int) -> ServedTable:
        if number not in self._shelves:
            raise Mismatch(f"there is no table {number} here: there are {len(self._shelves)}")
        return self._shelves[number]

    def _at_step(
        self,
        worker: int,
        request: rows.PullRows | rows.DigestTable | rows.ReadRows | rows.ClearTable,
    ) -> ServedTable | None:
        """Return the table of this message if it is at the step that the message waits for, and
        workers are in lockstep.
        """
        shelf, step = self._shelf(request.table), request.step
        if shelf.broken:
            raise UsageError(shelf.broken)
        if request.free:
            return (
                shelf
                if step <= (shelf.alone[worker] if request.free == "alone" else shelf.step)
                else None
            )
        if step < shelf.step:
            raise Mismatch(
                f"table {request.table} is asked for as it was after step {step}, and {shelf.step} "
                "have been taken"
            )
        return shelf if step == shelf.step else None

    def _open(self, worker: int, request: rows.OpenTable) -> Acknowledged:
        spec, settings = TableSpec(**request.spec), dict(request.settings)
        found = self._shelves.get(request.table)
        if found is None:
            self._put(
                request.table,
                ServedTable(
                    TableShard(spec, settings, server=request.server, servers=request.servers)
                ),
            )
        elif found.table.spec != spec or found.table.settings != settings:
            raise UsageError(
                f"workers have prepared different tables: {found.table.spec} and {spec}"
            )
        return Acknowledged()

    def _put(self, number: int, shelf: ServedTable) -> None:
        if len(self._shelves) >= TABLES and number not in self._shelves:
            raise Mismatch(
                f"{TABLES} tables are here, and table {number} would be "
                "one more than a model may have"
            )
        self._shelves[number] = shelf

    def _pull(self, worker: int, request: rows.PullRows) -> rows.Rows | None:
        shelf = self._at_step(worker, request)
        return None if shelf is None else rows.Rows(shelf.table.read(request.ids))

    # ---- steps

    def _push(self, worker: int, request: rows.PushRows) -> Acknowledged | None:
        found = [(self._shelf(gradient.table), gradient) for gradient in request.gradients]
        if any(gradient.step > shelf.step + 1 for shelf, gradient in found):
            return None  # a worker has not pushed anything for the step before
        for shelf, gradient in found:
            if shelf.broken:
                raise UsageError(shelf.broken)
            # where others decide whether the step is made, what is pushed again counts in place of
            # the first
            if gradient.step != shelf.step + 1 or (worker in shelf.given and not request.decided):
                raise Mismatch(
                    f"worker {worker} gives step {gradient.step} of table {gradient.table}, which "
                    "it has given before"
                )
            shelf.given[worker] = gradient
            if not request.decided and all(other in shelf.given for other in request.workers):
                self._step(gradient.table, shelf, request.workers)
        return Acknowledged()

    def _list_pushers(self, worker: int, request: rows.ListPushers) -> rows.Workers:
        return rows.Workers(tuple(sorted(self._shelf(request.table).given)))

    def _step(
        self, number: int, shelf: ServedTable, workers: Sequence[int], *, undo: bool = False
    ) -> RowsBefore:
        """Take the step, in the order of the workers: all are here."""
        found = [shelf.given[worker] for worker in workers]
        settings = found[0].settings
        if any(given.settings != settings for given in found):
            sides = "; ".join(
                f"worker {worker}: {given.settings}"
                for worker, given in zip(workers, found, strict=True)
            )
            shelf.broken = (
                f"workers step table {number} with different settings ({sides}): "
                "let schedules be alike on all of them"
            )
            raise UsageError(shelf.broken)
        if any(given.used for given in found):
            before = shelf.table.step(
                [(given.ids, given.grad) for given in found], settings, undo=undo
            )
        else:
            before = shelf.table.change(settings)
        shelf.given, shelf.step = {}, shelf.step + 1
        return before

    # ---- out of lockstep

    def _apply(self, worker: int, request: rows.ApplyRows) -> Acknowledged:
        for gradient in request.gradients:
            shelf = self._shelf(gradient.table)
            _free_step(shelf.table, [gradient], request)
            shelf.alone[worker] += 1
        return Acknowledged()

    def _hold(self, worker: int, request: rows.HoldRows) -> Acknowledged | None:
        found = [(self._shelf(gradient.table), gradient) for gradient in request.gradients]
        if any(shelf.step < request.after for shelf, _ in found):
            return None  # what it held before may be in that
        for shelf, gradient in found:
            shelf.held[worker] = gradient
        return Acknowledged()

    def _close(self, worker: int, request: rows.CloseRowStep) -> Acknowledged | None:
        step, workers = request.step, request.workers
        for number in request.tables:
            shelf = self._shelf(number)
            if step <= shelf.step:
                continue
            if step > shelf.step + 1:
                return None  # the step before has been decided, too
            absent = [other for other in workers if other not in shelf.held]
            if absent or not workers:
                raise Mismatch(
                    f"workers {absent} have come with nothing for step {step} of table {number}"
                )
            _free_step(shelf.table, [shelf.held.pop(other) for other in workers], request)
            shelf.step = step
        return Acknowledged()

    # ---- where losses are survived

    def _make(self, worker: int, request: rows.MakeRowSteps) -> Acknowledged | None:
        for step in request.steps:
            shelf = self._shelf(step.table)
            if shelf.broken:
                raise UsageError(shelf.broken)
            if request.calls <= shelf.discarded or step.step <= shelf.step:
                continue
            if step.step > shelf.step + 1:
                raise Mismatch(
                    f"step {step.step} of table {step.table} can't be made: "
                    f"{shelf.step} have been taken"
                )
            if any(other not in shelf.given for other in request.workers):
                return None  # losses are not survived yet
            shelf.made = [made for made in shelf.made if made.step > step.floor]
            if len(shelf.made) >= STEPS:
                raise Mismatch(
                    f"table {step.table} has made {STEPS} steps in a turn, and keeps no more of "
                    "them to be undone"
                )
            before = self._step(step.table, shelf, request.workers, undo=True)
            shelf.made.append(RowStep(step.step, request.calls, before))
        return Acknowledged()

    def _roll_back(self, worker: int, request: rows.RollBackRows) -> Acknowledged:
        for number, step in request.steps:
            shelf = self._shelf(number)
            shelf.discarded = max(shelf.discarded, request.calls)
            while (
                shelf.made and shelf.made[-1].step > step and shelf.made[-1].calls <= request.calls
            ):
                made = shelf.made.pop()
                shelf.table.back(made.before)
                shelf.step = made.step - 1
        return Acknowledged()

    def _describe(self, worker: int, request: rows.DescribeTable) -> rows.TableState:
        shelf = self._shelf(request.table)
        table = shelf.table
        return rows.TableState(
            table.spec.plain(), dict(table.settings), table.count, shelf.step, shelf.discarded
        )

    def _copy(self, worker: int, request: rows.CopyTable) -> Acknowledged:
        state = request.state
        table = TableShard(
            TableSpec(**state.spec),
            dict(state.settings),
            server=request.server,
            servers=request.servers,
        )
        table.count = state.count
        self._put(request.table, ServedTable(table, state.step, discarded=state.discarded))
        return Acknowledged()

    # ---- state

    def _digest(self, worker: int, request: rows.DigestTable) -> rows.TableDigest | None:
        shelf = self._at_step(worker, request)
        if shelf is None:
            return None
        return rows.TableDigest(
            f"{shelf.table.fingerprint():016x}", len(shelf.table), shelf.table.count
        )

    def _read(self, worker: int, request: rows.ReadRows) -> rows.RowsPart | None:
        shelf = self._at_step(worker, request)
        if shelf is None:
            return None
        part = shelf.table.part(request.start, request.stop)
        return rows.RowsPart(tuple(part), tuple(x.clone() for x in part.values()))

    def _clear(self, worker: int, request: rows.ClearTable) -> Acknowledged | None:
        shelf = self._at_step(worker, request)
        if shelf is None:
            return None
        shelf.table.forget(request.seed, request.count)
        shelf.held.clear()
        return Acknowledged()

    def _load(self, worker: int, request: rows.LoadRows) -> Acknowledged:
        self._shelf(request.table).table.put(dict(zip(request.names, request.tensors, strict=True)))
        return Acknowledged()


def _free_step(
    table: TableShard, found: Sequence[RowGradient], how: rows.ApplyRows | rows.CloseRowStep
) -> None:
    """Step with the settings of the first worker, whose schedule may be elsewhere than that of
    the others.
    """
    settings = found[0].settings
    if any(given.used for given in found):
        table.step(
            [(given.ids, given.grad) for given in found], settings, factor=how.factor, part=how.part
        )
    else:
        table.change(settings)
