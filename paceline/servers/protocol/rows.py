"""Messages on sparse tables.

A table is known by its number; a shard of servers keeps the rows that are dealt to it.

worker                                         server
OpenTable                    ----------->      what the table is
PullRows(step)               ----------->      the rows, once that step has been taken: may be asked
                                               for before
PushRows(step)               ----------->      some rows and their gradients, acknowledged; the last
                                               worker's is followed by the step
DigestTable, ReadRows        ----------->      what is in use, and in which state, once the step has
                                               been taken
ClearTable, LoadRows         ----------->      what was saved comes back

Where losses are survived, what is pushed makes no step by itself:

PushRows(decided)            ----------->      acknowledged
MakeRowSteps                 ----------->      all have decided that it is made: the first to say so
                                               makes it
RollBackRows                 ----------->      the turn comes again: so many steps have been made,
                                               and no more
DescribeTable, CopyTable     ----------->      what a table is and how far, for a copy that has
                                               begun; then its rows: ReadRows, LoadRows

Workers that are not in lockstep have no step in common that they wait for, so a pull may have later
ones in it:

ApplyRows                    ----------->      a step with this gradient alone
HoldRows(after)              ----------->      kept, in place of what this worker held, once that
                                               step has been made
CloseRowStep(step)           ----------->      the step is made by these workers, with what is held
                                               of them: the first to say so makes it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.servers.protocol.message import Acknowledged, Index, Message, Request


@dataclass(frozen=True)
class RowGradient(Message):
    """The gradient of one worker for a step of a table, of the rows of one server.

    `step` counts the steps of the table, from 1 on. `used`: whether a backward of it has reached
    the table. `settings` of its optimizer, where they are others than before. `ids`: rows, int64,
    [n], in order, each once; `grad`: [n, dim], of the table's dtype.
    """

    table: Index
    step: int
    used: bool
    settings: Mapping[str, Any] | None
    ids: Tensor
    grad: Tensor


@dataclass(frozen=True)
class DecidedRowStep(Message):
    """A step of a table that all have decided on.

    `floor`: how many it had taken when the turn began: they can't be undone any more.
    """

    table: Index
    step: int
    floor: int


# ---- a table


@dataclass(frozen=True)
class OpenTable(Request[Acknowledged], kind="rows.table"):
    """Begin a table, or make sure that it is this one.

    `spec`: the fields of a `TableSpec`; `settings` of its optimizer.

    The server keeps the rows r of which r % `servers` is `server`.
    """

    table: Index
    spec: Mapping[str, Any]
    settings: Mapping[str, Any]
    server: int
    servers: int


@dataclass(frozen=True)
class Rows(Message):
    """The values of the rows that were asked for: [n, dim], in their order."""

    values: Tensor


@dataclass(frozen=True)
class PullRows(Request[Rows], kind="rows.pull"):
    """Read the rows `ids` (int64, [n]) of this server once `step` has been taken.

    `free`: "" where workers are in lockstep, and that step has to be the last one. Else later steps
    may be in it; "alone": steps that this worker has taken by itself count, "together": those that
    were closed.
    """

    table: Index
    step: int
    free: str
    ids: Tensor


@dataclass(frozen=True)
class PushRows(Request[Acknowledged], kind="rows.give"):
    """Push this worker's gradients for the next step of some tables.

    The step is made once all `workers` have pushed theirs; or, if it is `decided` by others whether
    it is made, by `MakeRowSteps`.
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
    """Ask which workers have pushed a gradient for the next step: a worker that waits in vain
    wants to know.
    """

    table: Index


# ---- where losses are survived


@dataclass(frozen=True)
class MakeRowSteps(Request[Acknowledged], kind="rows.make"):
    """Make these steps with the gradients of these workers, in their order, if that has not been
    done.

    `calls`: how many calls the workers have completed together. What comes late, of a turn that was
    discarded since, does nothing.
    """

    steps: tuple[DecidedRowStep, ...]
    workers: tuple[int, ...]
    calls: int


@dataclass(frozen=True)
class RollBackRows(Request[Acknowledged], kind="rows.back"):
    """Undo the steps of a discarded turn: of each of these tables all but so many (table, steps).

    `calls` as in `MakeRowSteps`.
    """

    steps: tuple[tuple[int, int], ...]
    calls: int


@dataclass(frozen=True)
class TableState(Message):
    """What a table is, and how far: all that a copy needs but for the rows.

    `count`: steps in which any row had a gradient, `step`: those that were taken, `discarded`:
    calls when a turn was discarded last.
    """

    spec: Mapping[str, Any]
    settings: Mapping[str, Any]
    count: int
    step: int
    discarded: int


@dataclass(frozen=True)
class DescribeTable(Request[TableState], kind="rows.stand"):
    """Ask what a table is, and how far."""

    table: Index


@dataclass(frozen=True)
class CopyTable(Request[Acknowledged], kind="rows.become"):
    """Begin a copy of a table of another server of the shard, without its rows.

    `server` and `servers` as in `OpenTable`.
    """

    table: Index
    server: int
    servers: int
    state: TableState


# ---- out of lockstep


@dataclass(frozen=True)
class ApplyRows(Request[Acknowledged], kind="rows.apply"):
    """Take a step with this worker's gradients alone, times `factor`, with `part` of the
    learning rate.
    """

    gradients: tuple[RowGradient, ...]
    factor: float
    part: float


@dataclass(frozen=True)
class HoldRows(Request[Acknowledged], kind="rows.hold"):
    """Keep this worker's gradients, in place of what is held of it, once step `after` of the
    tables has been made.
    """

    gradients: tuple[RowGradient, ...]
    after: int


@dataclass(frozen=True)
class CloseRowStep(Request[Acknowledged], kind="rows.close"):
    """Make a step of these tables with what is held of these workers, in their order, if that has
    not been done.

    Their sum is multiplied by `factor`, the learning rate by `part`, that of the global batch which
    they have.
    """

    tables: tuple[Index, ...]
    step: int
    workers: tuple[int, ...]
    factor: float
    part: float


# ---- state


@dataclass(frozen=True)
class TableDigest(Message):
    """A digest of a server's rows in use (16 hexadecimal digits), how many `rows` those are, and
    the `count` of steps with any.
    """

    digest: str
    rows: int
    count: int


@dataclass(frozen=True)
class DigestTable(Request[TableDigest], kind="rows.digest"):
    """Ask for the digest of a table once `step` has been taken. `free` as in `PullRows`."""

    table: Index
    step: int
    free: str


@dataclass(frozen=True)
class RowsPart(Message):
    """Some rows in use, and what is remembered of them: `names` of the tensors, each with an
    entry a row.
    """

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class ReadRows(Request[RowsPart], kind="rows.part"):
    """Read rows in use, from number `start` to `stop` in the order of the server, once `step`
    has been taken. `free` as in `PullRows`.
    """

    table: Index
    step: int
    free: str
    start: int
    stop: int


@dataclass(frozen=True)
class ClearTable(Request[Acknowledged], kind="rows.clear"):
    """Let no row be in use any more, once `step` has been taken: rows begin by `seed` now, after
    `count` steps. `free` as in `PullRows`.
    """

    table: Index
    step: int
    free: str
    seed: int
    count: int


@dataclass(frozen=True)
class LoadRows(Request[Acknowledged], kind="rows.put"):
    """Take up what `ReadRows` gave."""

    table: Index
    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
