"""A split that all workers agree on, of what each has measured: which layers go to which stage
on workers of any speed and memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from paceline.comm.group import Group
from paceline.errors import UsageError
from paceline.parallel.pipelining.measuring import combine_costs
from paceline.parallel.pipelining.schedule import PipelineSchedule
from paceline.parallel.pipelining.split import LayerCost, SplitProblem


@dataclass(frozen=True)
class MeasuredPlace:
    """What layers take on one of the places that they are dealt to.

    `memory`: its bytes, where they are known.
    """

    place: int
    costs: Sequence[LayerCost]
    memory: float | None = None


def agree_problem(
    group: Group,
    place: int,
    schedule: PipelineSchedule,
    own: Sequence[LayerCost],
    *,
    memory: float | None = None,
) -> SplitProblem:
    """Make one problem of what all workers of a group have measured; equal on all, so that all find
    the same split. Collective.

    `place` is where this worker is along `stage`, where replicas of the model share a place. A
    place is as fast as the slowest of them, and has the memory of the smallest; `memory` is this
    worker's in bytes.
    """
    return agree_places(group, schedule, [MeasuredPlace(place, own, memory)])


def agree_places(
    group: Group, schedule: PipelineSchedule, own: Sequence[MeasuredPlace]
) -> SplitProblem:
    """Make one problem of the places that workers have measured, as many each. Collective."""
    gathered = group.gather_objects(
        [[one.place, one.memory, [list(astuple(cost)) for cost in one.costs]] for one in own],
        name="split",
    )
    names = [[row[0] for row in rows[0][2]] for rows in gathered]
    if other := next((rank for rank, found in enumerate(names) if found != names[0]), None):
        raise UsageError(
            f"ranks {group.global_rank(0)} and {group.global_rank(other)} have models with other "
            "layers; build the same one everywhere"
        )
    told = [row for rows in gathered for row in rows]
    costs, speeds = combine_costs([[LayerCost(*row) for row in rows] for _, _, rows in told])
    places = [
        [at for at, (there, _, _) in enumerate(told) if there == stage]
        for stage in range(schedule.ranks)
    ]
    if any(not found for found in places):
        raise UsageError(
            f"no worker is at place {places.index([])} of the {schedule.ranks} along stage"
        )
    given = [float("inf") if room is None else room for _, room, _ in told]
    rooms = (
        None if min(given) == float("inf") else [min(given[at] for at in found) for found in places]
    )
    return SplitProblem(
        costs, schedule, [min(speeds[at] for at in found) for found in places], rooms
    )
