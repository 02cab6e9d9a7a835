"""Messages of workers out of lockstep to the scheduler on the first server.

They are about samples, turns, and the workers that make a step.

DealSamples      begin an epoch, or the next part of one
TakeSamples      the worker's next samples, when there are some
CompleteTurn     a turn is over: answered once the next may begin
LeaveEpoch       take no more turns in the epoch
PauseDealing     let all workers stop taking, and come together
ArriveAtStep     answered once it is decided which workers make the step
GatherStep       answered once it is decided which step this is, or that the worker goes on
ListBehind       the workers waited for
ListNotArrived   the workers waited for in a step
PostNote         a note to the first worker
LoseWorkers      go on with the remaining workers

A request that comes again, because its worker was interrupted by a loss, does nothing twice, and
gets the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.servers.protocol.message import Acknowledged, Index, Message, Request

# of a global batch: its number in the epoch, the first sample, and the one after the last
Piece = tuple[int, int, int]


# ---- samples and turns


@dataclass(frozen=True)
class Clock(Message):
    """How many turns this worker has completed."""

    clock: int


@dataclass(frozen=True)
class DealSamples(Request[Clock], kind="deal"):
    """Deal the global batches of these sizes (int64, [n]), the first of which has the number
    `first` in its epoch, to these workers.

    `times`: how often that part of the epoch is gone on with, after all had stopped taking.
    """

    epoch: int
    first: int
    workers: tuple[int, ...]
    times: int
    sizes: Tensor


@dataclass(frozen=True)
class Samples(Message):
    """The next samples of a worker; None: there are none, for now if `paused`; `over`: it has no
    more turns to take.
    """

    piece: Piece | None
    over: bool
    paused: bool


@dataclass(frozen=True)
class TakeSamples(Request[Samples], kind="take"):
    """Take the next samples, at most so many: piece `number` of this worker, from 1 on."""

    most: int
    number: int


@dataclass(frozen=True)
class LeaveEpoch(Request[Acknowledged], kind="leave"):
    """Take no more turns in this epoch: nobody waits for this worker."""


@dataclass(frozen=True)
class PauseDealing(Request[Acknowledged], kind="pause"):
    """Stop dealing, so that all end their turns and come together."""


@dataclass(frozen=True)
class StepsDecided(Message):
    """The last step that was decided of each optimizer (optimizer, step)."""

    made: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class CompleteTurn(Request[StepsDecided], kind="tick"):
    """Complete turn `clock`, and wait until the next may begin: at most `bound` turns ahead of the
    slowest.

    `dropped`: its samples are in no step; `carried`: not yet, as no optimizer has stepped.
    """

    clock: int
    dropped: bool
    carried: bool
    bound: float


@dataclass(frozen=True)
class MissingWorkers(Message):
    """Workers that are waited for, and how many turns, or steps, each has completed."""

    missing: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ListBehind(Request[MissingWorkers], kind="behind"):
    """Ask which workers this one waits for."""


# ---- who makes which step


@dataclass(frozen=True)
class Contribution(Message):
    """What a worker says of the gradient that it comes with: the `part` of a global batch in it,
    and the settings of all groups.
    """

    part: float
    settings: tuple[tuple[int, Mapping[str, Any]], ...]


@dataclass(frozen=True)
class StepAssignment(Message):
    """The step that a gradient is in, and who makes it: the workers, the `settings` of the first,
    and the sum of their `parts`.

    `late`: it is too late, and `step` the last that was decided. `is_open`: the worker goes on
    before it is made, and `step` is the last one before. `mine`: this worker has it made.
    `slowest`: turns that all have completed.
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
class ArriveAtStep(Request[StepAssignment], kind="arrive"):
    """Come to a step of an optimizer, which the first to come make: all but so many `backups`.

    Step 0: the worker wants to be late.
    """

    optimizer: Index
    step: int
    backups: int
    contribution: Contribution


@dataclass(frozen=True)
class GatherStep(Request[StepAssignment], kind="gather"):
    """Come with gradient `number` of this worker to whichever step of an optimizer is next.

    `bound` as in `CompleteTurn`. `may_go_on`: a late worker may go on before it is made.
    """

    optimizer: Index
    number: int
    bound: float
    may_go_on: bool
    contribution: Contribution


@dataclass(frozen=True)
class ListNotArrived(Request[MissingWorkers], kind="missing"):
    """Ask which workers have not come to a step yet."""

    optimizer: Index
    step: int


# ---- notes, and losses


@dataclass(frozen=True)
class Notes(Message):
    """Notes that have come to the first worker, each a tensor of bytes, and whose they are."""

    workers: tuple[int, ...]
    notes: tuple[Tensor, ...]


@dataclass(frozen=True)
class PostNote(Request[Notes], kind="post"):
    """Send a note (uint8, empty: none) to the first worker, this worker's `number` from 1 on, or 0
    where it can't come twice.

    `stop`: no more samples are dealt in this epoch. `collect`: read the notes that have come, but
    for the first `had`, which arrived.
    """

    number: int
    stop: bool
    collect: bool
    had: int
    note: Tensor


@dataclass(frozen=True)
class LostWork(Message):
    """What went with lost workers: `steps` (optimizer, step) that they alone were to make, and
    how many samples nobody takes any more.
    """

    steps: tuple[tuple[int, int], ...]
    samples: int


@dataclass(frozen=True)
class LoseWorkers(Request[LostWork], kind="lose"):
    """Go on with these workers alone, the `living`: what others had under way is dealt again."""

    living: tuple[int, ...]
