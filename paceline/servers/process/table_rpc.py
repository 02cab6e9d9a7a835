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
from paceline.servers.process.table import RowUndo, TableShard, TableSpec
from paceline.servers.protocol import rows
from paceline.servers.protocol.message import Acknowledged, Handlers
from paceline.servers.protocol.rows import RowGradient

# Largest number of tables on a server, and of steps in a turn that can be undone.
MAX_TABLES, MAX_UNDOABLE_STEPS = 1000, 1000


class UndoableStep(NamedTuple):
    """A step that may still be undone."""

    step: int
    calls: int  # calls that the workers had completed when it was made
    undo_state: RowUndo


@dataclass
class ServedTable:
    """A table, the number of its last step, and gradients for later steps."""

    table: TableShard
    step: int = 0
    # Gradients for the next step, by worker.
    pending_gradients: dict[int, RowGradient] = field(default_factory=dict)
    # Why no more step can be made; empty if nothing is wrong.
    failure: str = ""
    # Steps of the current turn.
    undoable_steps: list[UndoableStep] = field(default_factory=list)
    # Calls that the workers had completed when a turn was last discarded.
    discarded_calls: int = -1
    # Out of lockstep, by worker: a gradient that is in no step yet.
    held_gradients: dict[int, RowGradient] = field(default_factory=dict)
    # Out of lockstep, by worker: number of steps that it has made by itself.
    solo_steps: Counter[int] = field(default_factory=Counter)


class TableRpc:
    """Answers messages on the tables of one server.

    `handlers` maps each request to the method that handles it. If that returns None, the reply has
    to wait.
    """

    def __init__(self) -> None:
        self._tables: dict[int, ServedTable] = {}
        self.handlers: Handlers = {
            rows.OpenTable: self._open_table,
            rows.PullRows: self._pull_rows,
            rows.PushRows: self._push_rows,
            rows.ListPushers: self._list_pushers,
            rows.MakeRowSteps: self._make_row_steps,
            rows.RollBackRows: self._roll_back_rows,
            rows.DescribeTable: self._describe_table,
            rows.CopyTable: self._copy_table,
            rows.ApplyRows: self._apply_rows,
            rows.HoldRows: self._hold_rows,
            rows.CloseRowStep: self._close_row_step,
            rows.DigestTable: self._digest_table,
            rows.ReadRows: self._read_rows,
            rows.ClearTable: self._clear_table,
            rows.LoadRows: self._load_rows,
        }

    @property
    def nbytes(self) -> int:
        """Bytes of rows in use, of their optimizer state, and of gradients for the next steps."""
        tensors = [
            tensor
            for served in self._tables.values()
            for gradient in (*served.pending_gradients.values(), *served.held_gradients.values())
            for tensor in (gradient.ids, gradient.grad)
        ]
        return sum(served.table.nbytes for served in self._tables.values()) + sum(
            tensor.nbytes for tensor in tensors
        )

    def summarize_tables(self) -> dict[str, Any]:
        """Collect the statistics for the summary: the number of rows in use."""
        return (
            {"rows": sum(len(served.table) for served in self._tables.values())}
            if self._tables
            else {}
        )

    def _get_table(self, number: int) -> ServedTable:
        if number not in self._tables:
            raise Mismatch(f"there is no table {number} here: there are {len(self._tables)}")
        return self._tables[number]

    def _get_table_at_step(
        self,
        worker: int,
        request: rows.PullRows | rows.DigestTable | rows.ReadRows | rows.ClearTable,
    ) -> ServedTable | None:
        """Get the table of a request once it is at the step that the request needs, else None."""
        served, step = self._get_table(request.table), request.step
        if served.failure:
            raise UsageError(served.failure)
            # Out of lockstep, the table may be ahead of the step that the worker needs.
        if request.free:
            return (
                served
                if step <= (served.solo_steps[worker] if request.free == "alone" else served.step)
                else None
            )
        # In lockstep, a worker has to see exactly its step.
        if step < served.step:
            raise Mismatch(
                f"table {request.table} is asked for as it was after step {step}, and "
                f"{served.step} have been taken"
            )
        return served if step == served.step else None

    def _open_table(self, worker: int, request: rows.OpenTable) -> Acknowledged:
        spec, settings = TableSpec(**request.spec), dict(request.settings)
        served = self._tables.get(request.table)
        if served is None:
            self._add_table(
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

    def _add_table(self, number: int, served: ServedTable) -> None:
        if len(self._tables) >= MAX_TABLES and number not in self._tables:
            raise Mismatch(
                f"{MAX_TABLES} tables are here, and table {number} would be "
                "one more than a model may have"
            )
        self._tables[number] = served

    def _pull_rows(self, worker: int, request: rows.PullRows) -> rows.Rows | None:
        served = self._get_table_at_step(worker, request)
        return None if served is None else rows.Rows(served.table.read_rows(request.ids))

    # ---- steps

    def _push_rows(self, worker: int, request: rows.PushRows) -> Acknowledged | None:
        gradients_by_table = [
            (self._get_table(gradient.table), gradient) for gradient in request.gradients
        ]
        if any(gradient.step > served.step + 1 for served, gradient in gradients_by_table):
            # Another worker has not pushed its gradient for the step before.
            return None
        for served, gradient in gradients_by_table:
            if served.failure:
                raise UsageError(served.failure)
            # If the workers decide on the step later, a repeated push replaces the first.
            if gradient.step != served.step + 1 or (
                worker in served.pending_gradients and not request.decided
            ):
                raise Mismatch(
                    f"worker {worker} gives step {gradient.step} of table {gradient.table}, which "
                    "it has given before"
                )
            served.pending_gradients[worker] = gradient
            if not request.decided and all(
                other in served.pending_gradients for other in request.workers
            ):
                self._take_step(gradient.table, served, request.workers)
        return Acknowledged()

    def _list_pushers(self, worker: int, request: rows.ListPushers) -> rows.Workers:
        return rows.Workers(tuple(sorted(self._get_table(request.table).pending_gradients)))

    def _take_step(
        self, number: int, served: ServedTable, workers: Sequence[int], *, undo: bool = False
    ) -> RowUndo:
        """Take the next step with the gradients of these workers, in the order of the list."""
        gradients = [served.pending_gradients[worker] for worker in workers]
        settings = gradients[0].settings
        # Different settings can't be repaired later: the table fails for all workers.
        if any(gradient.settings != settings for gradient in gradients):
            sides = "; ".join(
                f"worker {worker}: {gradient.settings}"
                for worker, gradient in zip(workers, gradients, strict=True)
            )
            served.failure = (
                f"workers step table {number} with different settings ({sides}): "
                "let schedules be alike on all of them"
            )
            raise UsageError(served.failure)
        if any(gradient.used for gradient in gradients):
            before = served.table.take_step(
                [(gradient.ids, gradient.grad) for gradient in gradients], settings, undo=undo
            )
        else:
            before = served.table.change_settings(settings)
        served.pending_gradients, served.step = {}, served.step + 1
        return before

    # ---- out of lockstep

    def _apply_rows(self, worker: int, request: rows.ApplyRows) -> Acknowledged:
        for gradient in request.gradients:
            served = self._get_table(gradient.table)
            _step_out_of_lockstep(served.table, [gradient], request)
            served.solo_steps[worker] += 1
        return Acknowledged()

    def _hold_rows(self, worker: int, request: rows.HoldRows) -> Acknowledged | None:
        gradients_by_table = [
            (self._get_table(gradient.table), gradient) for gradient in request.gradients
        ]
        if any(served.step < request.after for served, _ in gradients_by_table):
            # The gradient that this worker held before may still be needed for that step.
            return None
        for served, gradient in gradients_by_table:
            served.held_gradients[worker] = gradient
        return Acknowledged()

    def _close_row_step(self, worker: int, request: rows.CloseRowStep) -> Acknowledged | None:
        step, workers = request.step, request.workers
        for number in request.tables:
            served = self._get_table(number)
            # The request comes again, or another worker's request has made the step.
            if step <= served.step:
                continue
            if step > served.step + 1:
                # The step before was decided, too, but its request has not come yet.
                return None
            absent = [other for other in workers if other not in served.held_gradients]
            if absent or not workers:
                raise Mismatch(
                    f"workers {absent} have no gradient here for step {step} of table {number}"
                )
            _step_out_of_lockstep(
                served.table, [served.held_gradients.pop(other) for other in workers], request
            )
            served.step = step
        return Acknowledged()

    # ---- runs that survive lost workers

    def _make_row_steps(self, worker: int, request: rows.MakeRowSteps) -> Acknowledged | None:
        for step in request.steps:
            served = self._get_table(step.table)
            if served.failure:
                raise UsageError(served.failure)
            # A discarded turn, or a step that another worker's request has made.
            if request.calls <= served.discarded_calls or step.step <= served.step:
                continue
            if step.step > served.step + 1:
                raise Mismatch(
                    f"step {step.step} of table {step.table} can't be made: "
                    f"{served.step} have been taken"
                )
            if any(other not in served.pending_gradients for other in request.workers):
                # A gradient that all have decided on is still on its way.
                return None
            # Steps of earlier turns can't be undone any more.
            served.undoable_steps = [
                earlier for earlier in served.undoable_steps if earlier.step > step.floor
            ]
            if len(served.undoable_steps) >= MAX_UNDOABLE_STEPS:
                raise Mismatch(
                    f"table {step.table} has made {MAX_UNDOABLE_STEPS} steps in a turn, and keeps "
                    "no more of "
                    "them to be undone"
                )
            before = self._take_step(step.table, served, request.workers, undo=True)
            served.undoable_steps.append(UndoableStep(step.step, request.calls, before))
        return Acknowledged()

    def _roll_back_rows(self, worker: int, request: rows.RollBackRows) -> Acknowledged:
        for number, step in request.steps:
            served = self._get_table(number)
            served.discarded_calls = max(served.discarded_calls, request.calls)
            # Undo in reverse order, but no steps of later calls, which aren't part of that turn.
            while (
                served.undoable_steps
                and served.undoable_steps[-1].step > step
                and served.undoable_steps[-1].calls <= request.calls
            ):
                undone = served.undoable_steps.pop()
                served.table.undo_step(undone.undo_state)
                served.step = undone.step - 1
        return Acknowledged()

    def _describe_table(self, worker: int, request: rows.DescribeTable) -> rows.TableState:
        served = self._get_table(request.table)
        table = served.table
        return rows.TableState(
            table.spec.to_plain_data(),
            dict(table.settings),
            table.step_count,
            served.step,
            served.discarded_calls,
        )

    def _copy_table(self, worker: int, request: rows.CopyTable) -> Acknowledged:
        state = request.state
        table = TableShard(
            TableSpec(**state.spec),
            dict(state.settings),
            server=request.server,
            servers=request.servers,
        )
        table.step_count = state.count
        self._add_table(
            request.table, ServedTable(table, state.step, discarded_calls=state.discarded)
        )
        return Acknowledged()

    # ---- state

    def _digest_table(self, worker: int, request: rows.DigestTable) -> rows.TableDigest | None:
        served = self._get_table_at_step(worker, request)
        if served is None:
            return None
        return rows.TableDigest(
            f"{served.table.compute_fingerprint():016x}", len(served.table), served.table.step_count
        )

    def _read_rows(self, worker: int, request: rows.ReadRows) -> rows.RowsPart | None:
        served = self._get_table_at_step(worker, request)
        if served is None:
            return None
        part = served.table.get_part(request.start, request.stop)
        return rows.RowsPart(tuple(part), tuple(tensor.clone() for tensor in part.values()))

    def _clear_table(self, worker: int, request: rows.ClearTable) -> Acknowledged | None:
        served = self._get_table_at_step(worker, request)
        if served is None:
            return None
        served.table.reset_rows(request.seed, request.count)
        served.held_gradients.clear()
        return Acknowledged()

    def _load_rows(self, worker: int, request: rows.LoadRows) -> Acknowledged:
        self._get_table(request.table).table.load_part(
            dict(zip(request.names, request.tensors, strict=True))
        )
        return Acknowledged()


def _step_out_of_lockstep(
    table: TableShard, gradients: Sequence[RowGradient], request: rows.ApplyRows | rows.CloseRowStep
) -> None:
    """Step with the settings of the first worker, as schedules differ between workers here."""
    settings = gradients[0].settings
    if any(gradient.used for gradient in gradients):
        table.take_step(
            [(gradient.ids, gradient.grad) for gradient in gradients],
            settings,
            factor=request.factor,
            part=request.part,
        )
    else:
        table.change_settings(settings)
