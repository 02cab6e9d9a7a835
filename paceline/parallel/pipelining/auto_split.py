"""Agrees on one problem of splitting layers, from what all workers have measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from paceline.comm.group_protocol import Group
from paceline.errors import UsageError
from paceline.parallel.pipelining.measuring import combine_costs
from paceline.parallel.pipelining.schedule import PipelineSchedule
from paceline.parallel.pipelining.split import LayerCost, SplitProblem


@dataclass(frozen=True)
class MeasuredPlace:
    """Costs of layers at one place of `stage`, and its memory in bytes, if known."""

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
    """Make one problem of the measurements of all workers in a group. Collective.

    It is equal on all workers, so all of them find the same split. A place is as fast as the
    slowest worker there, and has the memory of the smallest.

    Args:
        group: All workers.
        place: This worker's place along `stage`, which it may share with other replicas.
        schedule: Schedule of the pipeline.
        own: Costs that this worker has measured.
        memory: Bytes of this worker. Default: no limit.
    """
    return agree_places(group, schedule, [MeasuredPlace(place, own, memory)])


def agree_places(
    group: Group, schedule: PipelineSchedule, own: Sequence[MeasuredPlace]
) -> SplitProblem:
    """Make one problem of the places that workers have measured, equally many each. Collective."""
    gathered = group.gather_objects(
        [[one.place, one.memory, [list(astuple(cost)) for cost in one.costs]] for one in own],
        name="split",
    )
    names = [[row[0] for row in rows[0][2]] for rows in gathered]
    if other := next((rank for rank, layers in enumerate(names) if layers != names[0]), None):
        raise UsageError(
            f"ranks {group.global_rank(0)} and {group.global_rank(other)} have models with other "
            "layers; build the same one everywhere"
        )
    rows_of_all = [row for rows in gathered for row in rows]
    costs, speeds = combine_costs([[LayerCost(*row) for row in rows] for _, _, rows in rows_of_all])
    # The measurements of each place: those of all replicas.
    places = [
        [at for at, (place, _, _) in enumerate(rows_of_all) if place == stage]
        for stage in range(schedule.ranks)
    ]
    if any(not rows for rows in places):
        raise UsageError(
            f"no worker is at place {places.index([])} of the {schedule.ranks} along stage"
        )
    memories = [float("inf") if memory is None else memory for _, memory, _ in rows_of_all]
    limits = (
        None
        if min(memories) == float("inf")
        else [min(memories[at] for at in rows) for rows in places]
    )
    return SplitProblem(
        costs, schedule, [min(speeds[at] for at in rows) for rows in places], limits
    )
