"""Messages on the parameters of a shard: its plan, pushed gradients, steps, and pulled parameters.

worker                                 server
PlanShard, FillUnit, LoadMemories      begins the shard, and sets its state
PushGradient         ------------->    keeps the gradient until the step, and acknowledges it
ReadNorm             ------------->    replies with the norm of the sums, once all workers' pushes
                                       have come
CloseStep            ------------->    takes the step, once all workers have closed it, or once it
                                       is decided which workers make it
ApplyGradient        ------------->    takes a step with this worker's pushes alone
PullUnit             ------------->    replies with the parameters, once that step has been taken
ListAbsent           ------------->    lists the workers that have not closed a step yet

Optimizers and the units of a shard are identified by their numbers. The steps of an optimizer are
counted from 1 on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.servers.protocol.message import Acknowledged, Index, Message, Request
from paceline.servers.protocol.samples import MissingWorkers

# Changed settings: number of each group, and its settings from now on.
SettingChanges = tuple[tuple[int, Mapping[str, Any]], ...]


# ---- the beginning


@dataclass(frozen=True)
class PlanShard(Request[Acknowledged]):
    """Begin the shard of this plan (`plans.pack_plan`, as uint8), or check that it is this one."""

    plan: Tensor


@dataclass(frozen=True)
class FillUnit(Request[Acknowledged]):
    """Set the parameters of a unit: 1-D, in the layout and the dtype of the unit."""

    unit: Index
    values: Tensor


@dataclass(frozen=True)
class OptimizerMemories(Message):
    """The optimizers' state of each piece of the plan.

    `packed` is a packed snapshot with a list of "memories", as uint8.
    """

    packed: Tensor


@dataclass(frozen=True)
class ReadMemories(Request[OptimizerMemories]):
    """Read the optimizers' state of each piece."""


@dataclass(frozen=True)
class LoadMemories(Request[Acknowledged]):
    """Set the optimizers' state of each piece, as `ReadMemories` gives it.

    The pieces may have been cut differently before.
    """

    packed: Tensor


# ---- steps


@dataclass(frozen=True)
class PushGradient(Request[Acknowledged]):
    """Push this worker's weighted gradient of a unit for `step`. It replaces an earlier push.

    Args:
        unit: Number of the unit.
        step: The step that the gradient is for.
        turn: The worker's turn, which determines the coding.
        used: A byte for each piece: whether the worker's backward reached it.
        keep: The gradient may be for a later step than the next one.
        drop_late: Leave out the gradient if it comes too late for `step`.
        gradient: 1-D, in the layout of the unit, or coded (uint8).
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
    """The norm of the sum of gradients, over all units of an optimizer on this server."""

    norm: float


@dataclass(frozen=True)
class ReadNorm(Request[Norm]):
    """Read the norm of the sum of these workers' gradients for a step.

    The reply waits until all of these workers have asked for the norm. If it is `decided` that they
    make the step, it waits until the step is the next one instead. `norm_type` is the order of the
    norm, as in torch; inf is the largest absolute value.
    """

    optimizer: Index
    step: int
    workers: tuple[int, ...]
    norm_type: float
    decided: bool


@dataclass(frozen=True)
class CloseStep(Request[Acknowledged]):
    """Make a step of an optimizer with the sum of these workers' gradients, unless it was made.

    The reply waits until all of these workers have closed the step in the same turn and with the
    same settings. If it is `decided` that they make the step, it waits until the step is the next
    one instead.

    Args:
        optimizer: Number of the optimizer.
        step: Number of the step.
        turn: The worker's turn of training.
        workers: The workers whose gradients are summed, in this order.
        factor: Factor of the sum.
        settings: Changed settings.
        decided: It was decided before that these workers make the step.
        part: Part of the global batch that these workers have. It multiplies the learning rate.
        keep: Keep the pushes of other workers for a later step.
        same: All workers send this request, in lockstep, and have to send the same one.
        undo: Keep the step so that it can be undone until the next.
    """

    optimizer: Index
    step: int
    turn: int
    workers: tuple[int, ...]
    factor: float
    settings: SettingChanges
    decided: bool = False
    part: float = 1.0
    keep: bool = False
    same: bool = False
    undo: bool = False


@dataclass(frozen=True)
class AwaitStep(Request[Acknowledged]):
    """Wait until a step has been made."""

    optimizer: Index
    step: int


@dataclass(frozen=True)
class ApplyGradient(Request[Acknowledged]):
    """Take a step with this worker's pushes alone, unless its step of this number was taken.

    The gradient is multiplied by `factor`. `part` is as in `CloseStep`. `settings` are the settings
    of all groups.
    """

    optimizer: Index
    step: int
    factor: float
    part: float
    settings: SettingChanges


@dataclass(frozen=True)
class ListAbsent(Request[MissingWorkers]):
    """List which of these workers have not closed a step yet.

    A negative step stands for its norm: list the workers that have not asked for it yet.
    """

    optimizer: Index
    step: int
    workers: tuple[int, ...]


# ---- parameters


@dataclass(frozen=True)
class UnitValues(Message):
    """The parameters of a unit, 1-D, in the layout of the unit."""

    values: Tensor


@dataclass(frozen=True)
class PullUnit(Request[UnitValues]):
    """Read the parameters of a unit once `step` has been taken.

    `copy`: send a copy, because other workers may step while the parameters are sent.
    """

    unit: Index
    step: int
    copy: bool
