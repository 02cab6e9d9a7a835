"""Messages on the parameters of a shard: how it begins, gradients that are pushed, steps, and
parameters that are pulled.

worker                                 server
PlanShard, FillUnit, LoadMemories      what it keeps, and how it begins
PushGradient         ------------->    kept until the step; acknowledged
ReadNorm             ------------->    the norm of the sums, once all workers' pushes are there
CloseStep            ------------->    the step, once all workers have closed it, or once it is
                                       decided who makes it
ApplyGradient        ------------->    a step with what this worker alone has pushed
PullUnit             ------------->    the parameters, once that step has been taken
ListAbsent           ------------->    the workers that have not closed a step yet

Optimizers, and the units of a shard, are known by their numbers; the steps of an optimizer are
counted from 1 on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.servers.protocol.message import Acknowledged, Index, Message, Request
from paceline.servers.protocol.samples import MissingWorkers

# of settings: numbers of groups, and their settings that count from now on
Changes = tuple[tuple[int, Mapping[str, Any]], ...]


# ---- how it begins


@dataclass(frozen=True)
class PlanShard(Request[Acknowledged], kind="plan"):
    """Begin the shard of this plan (`plans.write`, as uint8), or make sure that it is this one."""

    plan: Tensor


@dataclass(frozen=True)
class FillUnit(Request[Acknowledged], kind="fill"):
    """Set the parameters of a unit: 1-D, in its layout and of its dtype."""

    unit: Index
    values: Tensor


@dataclass(frozen=True)
class OptimizerMemories(Message):
    """What optimizers remember of each piece of the plan: a packed snapshot with a list of
    "memories", as uint8.
    """

    packed: Tensor


@dataclass(frozen=True)
class ReadMemories(Request[OptimizerMemories], kind="memories"):
    """Read what optimizers remember of each piece."""


@dataclass(frozen=True)
class LoadMemories(Request[Acknowledged], kind="remember"):
    """Set what optimizers remember of each piece: what `ReadMemories` gave, perhaps for pieces
    that were cut otherwise.
    """

    packed: Tensor


# ---- steps


@dataclass(frozen=True)
class PushGradient(Request[Acknowledged], kind="push"):
    """Push this worker's weighted gradient of a unit for `step`, in place of what it had pushed
    before.

    `turn` (of training) says in which coding it comes, `used` has a byte for each piece: whether
    the backward reached it. `keep`: it may be for a later step; `drop_late`: it is left out if it
    can't be in `step` any more. `gradient`: 1-D, in the layout of the unit, or coded (uint8).
    """

    unit: Index
    step: int
    turn: int
    used: bytes
    keep: bool
    drop_late: bool
    gradient: Tensor


@dataclass(frozen=True)
class Norm(Message):
    """The norm of the sum of gradients, over all units of an optimizer on the server."""

    norm: float


@dataclass(frozen=True)
class ReadNorm(Request[Norm], kind="norm"):
    """Ask for the norm (`norm_type` as in torch, inf for the largest) of the sum of these workers'
    gradients for a step.

    It waits until all of them have asked for it; or, where it is `decided` that they make the step,
    until that is the next one.
    """

    optimizer: Index
    step: int
    workers: tuple[int, ...]
    norm_type: float
    decided: bool


@dataclass(frozen=True)
class CloseStep(Request[Acknowledged], kind="close"):
    """Make a step of an optimizer with the sum of these workers' gradients, times `factor`, if that
    has not been done.

    It waits until all of them have closed it in the same `turn`, with the same `settings`; or,
    where it is `decided` that they make the step, until that is the next one. Then
    - `part`: the learning rate is multiplied by it, the part of the global batch that they have;
    - `keep`: pushes of others stay, for a later step;
    - `same`: all workers say this, in lockstep, and have to say the same;
    - `undo`: the step can be undone until the next.
    """

    optimizer: Index
    step: int
    turn: int
    workers: tuple[int, ...]
    factor: float
    settings: Changes
    decided: bool = False
    part: float = 1.0
    keep: bool = False
    same: bool = False
    undo: bool = False


@dataclass(frozen=True)
class AwaitStep(Request[Acknowledged], kind="taken"):
    """Wait until a step has been made."""

    optimizer: Index
    step: int


@dataclass(frozen=True)
class ApplyGradient(Request[Acknowledged], kind="apply"):
    """Take a step with what this worker alone has pushed, times `factor`, if its `step` of this
    number has not been taken.

    `part` as in `CloseStep`; `settings` of all groups.
    """

    optimizer: Index
    step: int
    factor: float
    part: float
    settings: Changes


@dataclass(frozen=True)
class ListAbsent(Request[MissingWorkers], kind="absent"):
    """Ask which of these workers have not closed a step yet; for -step: not asked for the norm
    of it.
    """

    optimizer: Index
    step: int
    workers: tuple[int, ...]


# ---- parameters


@dataclass(frozen=True)
class UnitValues(Message):
    """The parameters of a unit, 1-D, in its layout."""

    values: Tensor


@dataclass(frozen=True)
class PullUnit(Request[UnitValues], kind="read"):
    """Read the parameters of a unit once `step` has been taken.

    `copy`: others may step while they are sent.
    """

    unit: Index
    step: int
    copy: bool
