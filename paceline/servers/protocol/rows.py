"""Messages on sparse tables.

A table is identified by its number. Each server keeps the rows that are dealt to it.

worker                                         server
OpenTable                    ----------->      begins the table
PullRows(step)               ----------->      replies with rows, once that step has been taken; the
                                               request may come before
PushRows(step)               ----------->      acknowledges rows and gradients; takes the step after
                                               the last worker's push
DigestTable, ReadRows        ----------->      replies with the rows in use and their state, once
                                               the step has been taken
ClearTable, LoadRows         ----------->      takes back rows that were saved

If the run survives lost workers, pushes alone don't make a step:

PushRows(decided)            ----------->      acknowledges
MakeRowSteps                 ----------->      makes the steps that all workers have decided on, at
                                               the first of their requests
RollBackRows                 ----------->      undoes steps of a turn that begins again
DescribeTable, CopyTable     ----------->      copies a table without its rows to a server that has
                                               just begun; ReadRows and LoadRows copy the rows

Workers that are not in lockstep don't wait for a common step, so that a pull may contain later
steps:

ApplyRows                    ----------->      takes a step with this gradient alone
HoldRows(after)              ----------->      keeps the gradient in place of the worker's last,
                                               once step `after` has been made
CloseRowStep(step)           ----------->      makes the step of these workers from the gradients
                                               that are kept, at the first of their requests
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.servers.protocol.message import Acknowledged, Index, Message, Request


@dataclass(frozen=True)
class RowGradient(Message):
    """One worker's gradient of a table for one step: the rows of one server.

    Args:
        table: Number of the table.
        step: Step of the table, counted from 1 on.
        used: Whether a backward of the step reached the table.
        settings: The optimizer's settings from now on. None: no change.
        ids: Rows in rising order, each once: int64, [n].
        grad: Their gradients: [n, dim], of the table's dtype.
    """

    table: Index
    step: int
    used: bool
    settings: Mapping[str, Any] | None
    ids: Tensor
    grad: Tensor


@dataclass(frozen=True)
class DecidedRowStep(Message):
    """A step of a table that all workers have decided on.

    `floor` is the number of steps before the current turn, which can't be undone any more.
    """

    table: Index
    step: int
    floor: int


# ---- a table


@dataclass(frozen=True)
class OpenTable(Request[Acknowledged], kind="rows.table"):
    """Begin a table, or check that it is this one.

    `spec` has the fields of a `TableSpec`; `settings` are those of its optimizer. The server keeps
    the rows r with r % `servers` == `server`.
    """

    table: Index
    spec: Mapping[str, Any]
    settings: Mapping[str, Any]
    server: int
    servers: int


@dataclass(frozen=True)
class Rows(Message):
    """The values of the requested rows: [n, dim], in the order of the request."""

    values: Tensor


@dataclass(frozen=True)
class PullRows(Request[Rows], kind="rows.pull"):
    """Read the rows `ids` (int64, [n]) of this server once `step` has been taken.

    If workers are in lockstep, `free` is "", and `step` has to be the last step of the table.
    Otherwise the values may contain later steps. "alone": `step` counts the steps that this worker
    has taken by itself; "together": it counts the steps that were closed.
    """

    table: Index
    step: int
    free: str
    ids: Tensor


@dataclass(frozen=True)
class PushRows(Request[Acknowledged], kind="rows.give"):
    """Push this worker's gradients for the next step of some tables.

    The step is made once all `workers` have pushed theirs. If it is `decided` separately whether
    the step is made, `MakeRowSteps` makes it instead.
    """

    gradients: tuple[RowGradient, ...]
    workers: tuple[int, ...]
    decided: bool


@dataclass(frozen=True)
class Workers(Message):
    """The numbers of some workers."""

    workers: tuple[int, ...]


@dataclass(frozen=True)
class ListPushers(Request[Workers], kind="rows.given"):
    """List the workers that have pushed a gradient for the next step, for an error message."""

    table: Index


# ---- runs that survive lost workers


@dataclass(frozen=True)
class MakeRowSteps(Request[Acknowledged], kind="rows.make"):
    """Make these steps with the gradients of these workers, in their order, unless they were made.

    `calls` is the number of calls that the workers have completed together. A late request of a
    turn that was discarded does nothing.
    """

    steps: tuple[DecidedRowStep, ...]
    workers: tuple[int, ...]
    calls: int


@dataclass(frozen=True)
class RollBackRows(Request[Acknowledged], kind="rows.back"):
    """Undo the steps of a discarded turn.

    `steps` are pairs of a table and the number of its steps that stay. `calls` is as in
    `MakeRowSteps`.
    """

    steps: tuple[tuple[int, int], ...]
    calls: int


@dataclass(frozen=True)
class TableState(Message):
    """The state of a table without its rows.

    Args:
        spec: The fields of a `TableSpec`.
        settings: The optimizer's settings.
        count: Number of steps in which any row had a gradient.
        step: Number of all steps.
        discarded: The calls that the workers had completed when a turn was last discarded.
    """

    spec: Mapping[str, Any]
    settings: Mapping[str, Any]
    count: int
    step: int
    discarded: int


@dataclass(frozen=True)
class DescribeTable(Request[TableState], kind="rows.stand"):
    """Read the state of a table without its rows."""

    table: Index


@dataclass(frozen=True)
class CopyTable(Request[Acknowledged], kind="rows.become"):
    """Begin a copy of a table of another server of the same shard, without its rows.

    `server` and `servers` are as in `OpenTable`.
    """

    table: Index
    server: int
    servers: int
    state: TableState


# ---- out of lockstep


@dataclass(frozen=True)
class ApplyRows(Request[Acknowledged], kind="rows.apply"):
    """Take a step with this worker's gradients alone.

    `factor` multiplies the gradients, `part` the learning rate.
    """

    gradients: tuple[RowGradient, ...]
    factor: float
    part: float


@dataclass(frozen=True)
class HoldRows(Request[Acknowledged], kind="rows.hold"):
    """Keep this worker's gradients in place of the ones that are held.

    The reply waits until step `after` of the tables has been made.
    """

    gradients: tuple[RowGradient, ...]
    after: int


@dataclass(frozen=True)
class CloseRowStep(Request[Acknowledged], kind="rows.close"):
    """Make a step of these tables with the held gradients of these workers, unless it was made.

    The gradients are added in the order of the workers. `factor` multiplies the sum. `part`, the
    workers' part of the global batch, multiplies the learning rate.
    """

    tables: tuple[Index, ...]
    step: int
    workers: tuple[int, ...]
    factor: float
    part: float


# ---- state


@dataclass(frozen=True)
class TableDigest(Message):
    """A digest of a server's rows in use.

    `digest` has 16 hexadecimal digits. `rows` is the number of rows in use, `count` the number of
    steps in which any row had a gradient.
    """

    digest: str
    rows: int
    count: int


@dataclass(frozen=True)
class DigestTable(Request[TableDigest], kind="rows.digest"):
    """Read the digest of a table once `step` has been taken. `free` is as in `PullRows`."""

    table: Index
    step: int
    free: str


@dataclass(frozen=True)
class RowsPart(Message):
    """Some rows in use, with their optimizer state.

    `names` are the names of the tensors. Each tensor has an entry for each row.
    """

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class ReadRows(Request[RowsPart], kind="rows.part"):
    """Read rows `start` to `stop` of those in use, once `step` has been taken.

    The rows are in the order of their first use on the server. `free` is as in `PullRows`.
    """

    table: Index
    step: int
    free: str
    start: int
    stop: int


@dataclass(frozen=True)
class ClearTable(Request[Acknowledged], kind="rows.clear"):
    """Remove all rows once `step` has been taken.

    From then on, initial values follow from `seed`, and the next step is number `count` + 1. `free`
    is as in `PullRows`.
    """

    table: Index
    step: int
    free: str
    seed: int
    count: int


@dataclass(frozen=True)
class LoadRows(Request[Acknowledged], kind="rows.put"):
    """Load rows that `ReadRows` gave."""

    table: Index
    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
