"""Answers the messages of workers on the sparse tables of a server.

`protocol.rows` defines the messages. There are three ways to step a table:

- In lockstep, a step is made as soon as all its workers have pushed their gradients.
- If the run survives lost workers, pushed gradients are only kept. A step is made once all workers
  have decided on it (`_make_row_steps`), and can be undone when the turn is discarded. Each request
  says how many calls the workers have completed together (`calls`). So a request of a lost worker
  for a discarded turn, which may come after others have gone on, does nothing.
- Out of lockstep, each worker steps by itself (`_apply_rows`), or together with the other workers
  of a step, by gradients that are held here (`_hold_rows`, `_close_row_step`).
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

# Largest number of tables on a server, and of steps in a turn that can be undone.
TABLES, STEPS = 1000, 1000


class RowStep(NamedTuple):
    """A step that may still be undone."""

    step: int
    calls: int  # calls that the workers had completed when it was made
    before: RowsBefore


@dataclass
class ServedTable:
    """A table, the number of its last step, and gradients for later steps."""

    table: TableShard
    step: int = 0
    # Gradients for the next step, by worker.
    given: dict[int, RowGradient] = field(default_factory=dict)
    # Why no more step can be made; empty if nothing is wrong.
    broken: str = ""
    # Steps of the current turn.
    made: list[RowStep] = field(default_factory=list)
    # Calls that the workers had completed when a turn was last discarded.
    discarded: int = -1
    # Out of lockstep, by worker: a gradient that is in no step yet.
    held: dict[int, RowGradient] = field(default_factory=dict)
    # Out of lockstep, by worker: number of steps that it has made by itself.
    alone: Counter[int] = field(default_factory=Counter)


class TableService:
    """Answers messages on the tables of one server.

    `handlers` maps each request to the method that handles it. If that returns None, the reply has
    to wait.
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
        tensors = [
            tensor
            for served in self._shelves.values()
            for gradient in (*served.given.values(), *served.held.values())
            for tensor in (gradient.ids, gradient.grad)
        ]
        return sum(served.table.nbytes for served in self._shelves.values()) + sum(
            tensor.nbytes for tensor in tensors
        )

    def facts(self) -> dict[str, Any]:
        """Collect the statistics for the summary: the number of rows in use."""
        return (
            {"rows": sum(len(served.table) for served in self._shelves.values())}
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
        """Get the table of a request once it is at the step that the request needs, else None."""
        served, step = self._shelf(request.table), request.step
        if served.broken:
            raise UsageError(served.broken)
            # Out of lockstep, the table may be ahead of the step that the worker needs.
        if request.free:
            return (
                served
                if step <= (served.alone[worker] if request.free == "alone" else served.step)
                else None
            )
        # In lockstep, a worker has to see exactly its step.
        if step < served.step:
            raise Mismatch(
                f"table {request.table} is asked for as it was after step {step}, and "
                f"{served.step} have been taken"
            )
        return served if step == served.step else None

    def _open(self, worker: int, request: rows.OpenTable) -> Acknowledged:
        spec, settings = TableSpec(**request.spec), dict(request.settings)
        served = self._shelves.get(request.table)
        if served is None:
            self._put(
                request.table,
                ServedTable(
                    TableShard(spec, settings, server=request.server, servers=request.servers)
                ),
            )
        elif served.table.spec != spec or served.table.settings != settings:
            raise UsageError(
                f"workers have prepared different tables: {served.table.spec} and {spec}"
            )
        return Acknowledged()

    def _put(self, number: int, served: ServedTable) -> None:
        if len(self._shelves) >= TABLES and number not in self._shelves:
            raise Mismatch(
                f"{TABLES} tables are here, and table {number} would be "
                "one more than a model may have"
            )
        self._shelves[number] = served

    def _pull(self, worker: int, request: rows.PullRows) -> rows.Rows | None:
        served = self._at_step(worker, request)
        return None if served is None else rows.Rows(served.table.read(request.ids))

    # ---- steps

    def _push(self, worker: int, request: rows.PushRows) -> Acknowledged | None:
        gradients_by_table = [
            (self._shelf(gradient.table), gradient) for gradient in request.gradients
        ]
        if any(gradient.step > served.step + 1 for served, gradient in gradients_by_table):
            # Another worker has not pushed its gradient for the step before.
            return None
        for served, gradient in gradients_by_table:
            if served.broken:
                raise UsageError(served.broken)
            # If the workers decide on the step later, a repeated push replaces the first.
            if gradient.step != served.step + 1 or (worker in served.given and not request.decided):
                raise Mismatch(
                    f"worker {worker} gives step {gradient.step} of table {gradient.table}, which "
                    "it has given before"
                )
            served.given[worker] = gradient
            if not request.decided and all(other in served.given for other in request.workers):
                self._step(gradient.table, served, request.workers)
        return Acknowledged()

    def _list_pushers(self, worker: int, request: rows.ListPushers) -> rows.Workers:
        return rows.Workers(tuple(sorted(self._shelf(request.table).given)))

    def _step(
        self, number: int, served: ServedTable, workers: Sequence[int], *, undo: bool = False
    ) -> RowsBefore:
        """Take the next step with the gradients of these workers, in the order of the list."""
        gradients = [served.given[worker] for worker in workers]
        settings = gradients[0].settings
        # Different settings can't be repaired later: the table fails for all workers.
        if any(gradient.settings != settings for gradient in gradients):
            sides = "; ".join(
                f"worker {worker}: {gradient.settings}"
                for worker, gradient in zip(workers, gradients, strict=True)
            )
            served.broken = (
                f"workers step table {number} with different settings ({sides}): "
                "let schedules be alike on all of them"
            )
            raise UsageError(served.broken)
        if any(gradient.used for gradient in gradients):
            before = served.table.step(
                [(gradient.ids, gradient.grad) for gradient in gradients], settings, undo=undo
            )
        else:
            before = served.table.change(settings)
        served.given, served.step = {}, served.step + 1
        return before

    # ---- out of lockstep

    def _apply(self, worker: int, request: rows.ApplyRows) -> Acknowledged:
        for gradient in request.gradients:
            served = self._shelf(gradient.table)
            _free_step(served.table, [gradient], request)
            served.alone[worker] += 1
        return Acknowledged()

    def _hold(self, worker: int, request: rows.HoldRows) -> Acknowledged | None:
        gradients_by_table = [
            (self._shelf(gradient.table), gradient) for gradient in request.gradients
        ]
        if any(served.step < request.after for served, _ in gradients_by_table):
            # The gradient that this worker held before may still be needed for that step.
            return None
        for served, gradient in gradients_by_table:
            served.held[worker] = gradient
        return Acknowledged()

    def _close(self, worker: int, request: rows.CloseRowStep) -> Acknowledged | None:
        step, workers = request.step, request.workers
        for number in request.tables:
            served = self._shelf(number)
            # The request comes again, or another worker's request has made the step.
            if step <= served.step:
                continue
            if step > served.step + 1:
                # The step before was decided, too, but its request has not come yet.
                return None
            absent = [other for other in workers if other not in served.held]
            if absent or not workers:
                raise Mismatch(
                    f"workers {absent} have no gradient here for step {step} of table {number}"
                )
            _free_step(served.table, [served.held.pop(other) for other in workers], request)
            served.step = step
        return Acknowledged()

    # ---- runs that survive lost workers

    def _make(self, worker: int, request: rows.MakeRowSteps) -> Acknowledged | None:
        for step in request.steps:
            served = self._shelf(step.table)
            if served.broken:
                raise UsageError(served.broken)
            # A discarded turn, or a step that another worker's request has made.
            if request.calls <= served.discarded or step.step <= served.step:
                continue
            if step.step > served.step + 1:
                raise Mismatch(
                    f"step {step.step} of table {step.table} can't be made: "
                    f"{served.step} have been taken"
                )
            if any(other not in served.given for other in request.workers):
                # A gradient that all have decided on is still on its way.
                return None
            # Steps of earlier turns can't be undone any more.
            served.made = [earlier for earlier in served.made if earlier.step > step.floor]
            if len(served.made) >= STEPS:
                raise Mismatch(
                    f"table {step.table} has made {STEPS} steps in a turn, and keeps no more of "
                    "them to be undone"
                )
            before = self._step(step.table, served, request.workers, undo=True)
            served.made.append(RowStep(step.step, request.calls, before))
        return Acknowledged()

    def _roll_back(self, worker: int, request: rows.RollBackRows) -> Acknowledged:
        for number, step in request.steps:
            served = self._shelf(number)
            served.discarded = max(served.discarded, request.calls)
            # Undo in reverse order, but no steps of later calls, which aren't part of that turn.
            while (
                served.made
                and served.made[-1].step > step
                and served.made[-1].calls <= request.calls
            ):
                undone = served.made.pop()
                served.table.back(undone.before)
                served.step = undone.step - 1
        return Acknowledged()

    def _describe(self, worker: int, request: rows.DescribeTable) -> rows.TableState:
        served = self._shelf(request.table)
        table = served.table
        return rows.TableState(
            table.spec.plain(), dict(table.settings), table.count, served.step, served.discarded
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
        served = self._at_step(worker, request)
        if served is None:
            return None
        return rows.TableDigest(
            f"{served.table.fingerprint():016x}", len(served.table), served.table.count
        )

    def _read(self, worker: int, request: rows.ReadRows) -> rows.RowsPart | None:
        served = self._at_step(worker, request)
        if served is None:
            return None
        part = served.table.part(request.start, request.stop)
        return rows.RowsPart(tuple(part), tuple(tensor.clone() for tensor in part.values()))

    def _clear(self, worker: int, request: rows.ClearTable) -> Acknowledged | None:
        served = self._at_step(worker, request)
        if served is None:
            return None
        served.table.forget(request.seed, request.count)
        served.held.clear()
        return Acknowledged()

    def _load(self, worker: int, request: rows.LoadRows) -> Acknowledged:
        self._shelf(request.table).table.put(dict(zip(request.names, request.tensors, strict=True)))
        return Acknowledged()


def _free_step(
    table: TableShard, gradients: Sequence[RowGradient], request: rows.ApplyRows | rows.CloseRowStep
) -> None:
    """Step with the settings of the first worker, as schedules differ between workers here."""
    settings = gradients[0].settings
    if any(gradient.used for gradient in gradients):
        table.step(
            [(gradient.ids, gradient.grad) for gradient in gradients],
            settings,
            factor=request.factor,
            part=request.part,
        )
    else:
        table.change(settings)
