"""Messages of workers that are not in lockstep to the scheduler on the first server.

They are about samples, turns, and the workers that make a step:

DealSamples      begins an epoch, or the next part of one
TakeSamples      replies with the worker's next samples, once there are some
CompleteTurn     ends a turn: the reply comes once the next turn may begin
LeaveEpoch       takes no more turns in the epoch
PauseDealing     lets all workers stop taking samples, and come together
ArriveAtStep     replies once it is decided which workers make the step
GatherStep       replies once it is decided which step has the gradient, or that the worker goes on
ListBehind       lists the workers that this one waits for before its next turn
ListNotArrived   lists the workers that a step waits for
PostNote         sends a note to the first worker
LoseWorkers      goes on with the remaining workers

A worker that was interrupted by a loss repeats its request. A repeated request does nothing twice,
and gets the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.servers.protocol.message import Acknowledged, Index, Message, Request

# Part of a global batch: its number in the epoch, its first sample, and the one after its last.
Piece = tuple[int, int, int]


# ---- samples and turns


@dataclass(frozen=True)
class Clock(Message):
    """Number of turns that this worker has completed."""

    clock: int


@dataclass(frozen=True)
class DealSamples(Request[Clock]):
    """Deal the global batches of an epoch, or of the next part of one, to these workers.

    Args:
        epoch: Number of the epoch.
        first: Number of the first of these batches in the epoch.
        workers: The workers that take part.
        times: Number of times that this part was resumed after a pause.
        sizes: Number of samples in each batch: int64, [n].
    """

    epoch: int
    first: int
    workers: tuple[int, ...]
    times: int
    sizes: Tensor


@dataclass(frozen=True)
class Samples(Message):
    """The next samples of a worker.

    `piece` is None if there are none: for now if `paused`, and for this epoch if `over`.
    """

    piece: Piece | None
    over: bool
    paused: bool


@dataclass(frozen=True)
class TakeSamples(Request[Samples]):
    """Take the next samples, at most `most`. `number` counts the worker's pieces from 1 on."""

    most: int
    number: int


@dataclass(frozen=True)
class LeaveEpoch(Request[Acknowledged]):
    """Take no more turns in this epoch. No other worker waits for this one."""


@dataclass(frozen=True)
class PauseDealing(Request[Acknowledged]):
    """Stop dealing, so that all workers end their turns and come together."""


@dataclass(frozen=True)
class StepsDecided(Message):
    """The last decided step of each optimizer, as pairs of optimizer and step."""

    made: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class CompleteTurn(Request[StepsDecided]):
    """Complete turn `clock`, and wait until the next turn may begin.

    Args:
        clock: Number of turns that this worker has completed.
        dropped: The samples of the turn are in no step.
        carried: The samples are in no step yet, because no optimizer stepped in the turn.
        bound: Largest lead over the slowest worker, in turns, with which a turn may begin.
    """

    clock: int
    dropped: bool
    carried: bool
    bound: float


@dataclass(frozen=True)
class MissingWorkers(Message):
    """The workers that are waited for, with the turns or steps that each has completed."""

    missing: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ListBehind(Request[MissingWorkers]):
    """List the workers that this one waits for."""


# ---- the workers that make a step


@dataclass(frozen=True)
class Contribution(Message):
    """What a worker contributes to a step, beside its pushed gradient.

    `part` is the part of a global batch in the gradient. `settings` are those of all groups.
    """

    part: float
    settings: tuple[tuple[int, Mapping[str, Any]], ...]


@dataclass(frozen=True)
class StepAssignment(Message):
    """The step that has a gradient, and the workers that make it.

    Args:
        step: Number of the step. If `late`, the last one that was decided; if `is_open`, the last
            one that was made.
        late: The gradient is too late for its step.
        is_open: The worker goes on before the step is made.
        mine: This worker asks the servers to take the step.
        workers: The workers that make the step.
        parts: Sum of their parts of the global batch.
        settings: The optimizer settings of the first of them.
        slowest: Number of turns that all workers have completed.
    """

    step: int
    late: bool = False
    is_open: bool = False
    mine: bool = True
    workers: tuple[int, ...] = ()
    parts: float = 0.0
    settings: tuple[tuple[int, Mapping[str, Any]], ...] = ()
    slowest: int = 0


@dataclass(frozen=True)
class ArriveAtStep(Request[StepAssignment]):
    """Arrive at a step of an optimizer with backup workers.

    The first workers to arrive make the step: all but `backups` of them. A worker that wants to be
    late sends step 0.
    """

    optimizer: Index
    step: int
    backups: int
    contribution: Contribution


@dataclass(frozen=True)
class GatherStep(Request[StepAssignment]):
    """Add gradient `number` of this worker to whichever step of an optimizer is next.

    `bound` is as in `CompleteTurn`. `may_go_on`: a late worker may go on before the step is made.
    """

    optimizer: Index
    number: int
    bound: float
    may_go_on: bool
    contribution: Contribution


@dataclass(frozen=True)
class ListNotArrived(Request[MissingWorkers]):
    """List the workers that have not arrived at a step yet."""

    optimizer: Index
    step: int


# ---- notes, and lost workers


@dataclass(frozen=True)
class Notes(Message):
    """Notes to the first worker, each a tensor of bytes, with the workers that sent them."""

    workers: tuple[int, ...]
    notes: tuple[Tensor, ...]


@dataclass(frozen=True)
class PostNote(Request[Notes]):
    """Send a note to the first worker, or read its notes.

    Args:
        number: Count of this worker's notes, from 1 on; 0 if the request is never repeated.
        stop: Stop dealing samples in this epoch.
        collect: Reply with all notes, except the first `had`.
        had: Number of notes that have arrived.
        note: The note, uint8. Empty: there is none.
    """

    number: int
    stop: bool
    collect: bool
    had: int
    note: Tensor


@dataclass(frozen=True)
class LostWork(Message):
    """What was lost with lost workers.

    `steps` (optimizer, step) are decided, but no worker is left to make them. `samples` is the
    number of samples that no worker takes any more.
    """

    steps: tuple[tuple[int, int], ...]
    samples: int


@dataclass(frozen=True)
class LoseWorkers(Request[LostWork]):
    """Go on with the workers `living` alone. Pieces of lost workers are dealt again."""

    living: tuple[int, ...]
