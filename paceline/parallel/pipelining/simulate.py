"""Runs a schedule on given times, without a process: begins and ends of actions, bubble, memory.

rank 0   F0 F1 F2 .  .  .  B0 --       a rank does one action at a time, in the order of its row
           \\           /               results travel while the rank goes on
rank 1   .  .  F0 B0 -- F1 B1 --
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.comm.schedule import LinkSpeed
from paceline.errors import UsageError
from paceline.formatting import format_count
from paceline.parallel.pipelining.schedule import (
    Action,
    Kind,
    PipelineSchedule,
    count_kept,
    order_actions,
)

INSTANT = LinkSpeed(0.0, float("inf"))


@dataclass(frozen=True)
class StageTimes:
    """What one micro-batch takes in each stage and between stages.

    Seconds are those of a rank of speed 1. `sends`, `returns` and `links` have a value for each
    boundary between a stage and the next, and all others one for each stage.

    Attributes:
        forwards: Seconds of the forward.
        backwards: Seconds of the whole backward.
        input_backwards: Seconds of its `input` half. Default: half of the backward.
        weight_backwards: Seconds of its `weight` half. Default: half of the backward.
        kept: Bytes of activations that the stage keeps for its backward. Default: not computed.
        sends: Bytes that go over the boundary. Default: none.
        returns: Bytes of gradients that come back over it. Default: as many as it sends.
        links: Speed of the link. Default: transfers take no time.
    """

    forwards: Sequence[float]
    backwards: Sequence[float]
    input_backwards: Sequence[float] | None = None
    weight_backwards: Sequence[float] | None = None
    kept: Sequence[float] | None = None
    sends: Sequence[float] | None = None
    returns: Sequence[float] | None = None
    links: Sequence[LinkSpeed] | None = None

    def seconds(self, kind: Kind, stage: int) -> float:
        """Seconds of an action on a rank of speed 1."""
        if kind == "forward":
            return self.forwards[stage]
        whole = self.backwards[stage]
        if kind == "input":
            return whole / 2 if self.input_backwards is None else self.input_backwards[stage]
        if kind == "weight":
            return whole / 2 if self.weight_backwards is None else self.weight_backwards[stage]
        return whole

    def transfer_nbytes(self, boundary: int, *, back: bool) -> float:
        """Bytes that go over a boundary for one micro-batch, or come back over it."""
        chosen = self.returns if back and self.returns is not None else self.sends
        return 0.0 if chosen is None else chosen[boundary]


@dataclass(frozen=True)
class ActionSpan:
    """An action with its begin and end, in seconds."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Transfer:
    """The result of `action` on its way from rank `source` to rank `target`.

    It leaves at `start`, and all of it has arrived at `end`, in seconds.
    """

    action: Action
    source: int
    target: int
    start: float
    end: float
    nbytes: float


@dataclass(frozen=True)
class PipelineTimeline:
    """The times of all actions of a schedule, a row for each rank, and of all transfers, from 0."""

    schedule: PipelineSchedule
    rows: tuple[tuple[ActionSpan, ...], ...]
    transfers: tuple[Transfer, ...]
    kept_bytes: tuple[float, ...]
    """Bytes of activations that each rank keeps at once, at most."""

    @cached_property
    def makespan(self) -> float:
        """Seconds until all is done."""
        return max(row[-1].end for row in self.rows)

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Seconds in which each rank has nothing to do."""
        return tuple(
            self.makespan - sum(span.end - span.start for span in row) for row in self.rows
        )

    @property
    def bubble(self) -> float:
        """Fraction of all ranks' time in which they have nothing to do, from 0 to 1."""
        return sum(self.idle) / (self.schedule.ranks * self.makespan) if self.makespan else 0.0

    @property
    def kept_micro_batches(self) -> tuple[float, ...]:
        """Number of micro-batches whose activations each rank keeps at once, at most.

        A micro-batch in one of two stages of a rank counts one half.
        """
        schedule = self.schedule
        return tuple(
            count / len(schedule.stages_of_rank(rank))
            for rank, count in enumerate(count_kept(schedule))
        )


def simulate_schedule(
    schedule: PipelineSchedule, times: StageTimes, speeds: Sequence[float] | None = None
) -> PipelineTimeline:
    """Run a schedule on given times.

    A rank begins an action when it has finished the one before, and all that the action needs is
    there. Transfers run beside computing. Those from one rank to another leave one after another,
    each once its tensor is made and the link is free. A transfer occupies the link for the time of
    its bytes, and arrives a latency later. Nothing travels between two stages of one rank.

    Args:
        schedule: Schedule to run.
        times: Times and sizes of its stages.
        speeds: How much faster each rank is than a rank of speed 1. Default: all have speed 1.

    Raises:
        UsageError: Times don't fit the schedule.
    """
    speeds = [1.0] * schedule.ranks if speeds is None else speeds
    _check_times(schedule, times, speeds)
    # When the result of an action is where it is needed.
    available_at: dict[Action, float] = {}
    clock = [0.0] * schedule.ranks
    # When the link from one rank to another is free again.
    free: dict[tuple[int, int], float] = {}
    rows: list[list[ActionSpan]] = [[] for _ in range(schedule.ranks)]
    transfers = []
    # A link is used by one rank, in the order of its row. So ranks can be gone through in any
    # order.
    for rank, action in order_actions(schedule):
        start = max(
            [
                clock[rank],
                *(
                    available_at[need]
                    for need in schedule.find_needed(action)
                    if need.stage != action.stage
                ),
            ]
        )
        clock[rank] = start + times.seconds(action.kind, action.stage) / speeds[rank]
        rows[rank].append(ActionSpan(action, start, clock[rank]))
        available_at[action] = clock[rank]
        stage = schedule.target_stage(action)
        if stage is not None and (way := (rank, schedule.placed[stage])) != (rank, rank):
            boundary = min(stage, action.stage)
            link = INSTANT if times.links is None else times.links[boundary]
            nbytes = times.transfer_nbytes(boundary, back=stage < action.stage)
            leaves = max(clock[rank], free.get(way, 0.0))
            free[way] = leaves + nbytes / link.bytes_per_second
            available_at[action] = free[way] + link.latency_seconds
            transfers.append(Transfer(action, *way, leaves, available_at[action], nbytes))
    kept_bytes = [0.0] * schedule.ranks if times.kept is None else count_kept(schedule, times.kept)
    return PipelineTimeline(schedule, tuple(map(tuple, rows)), tuple(transfers), tuple(kept_bytes))


def _check_times(schedule: PipelineSchedule, times: StageTimes, speeds: Sequence[float]) -> None:
    """Raise `UsageError` if there are too few or too many times, or impossible ones."""
    stages, between = schedule.stages, schedule.stages - 1
    lengths = dict.fromkeys(
        ("forwards", "backwards", "input_backwards", "weight_backwards", "kept"), stages
    )
    lengths |= {"sends": between, "returns": between}
    values_by_name = {name: getattr(times, name) for name in lengths} | {
        "links": times.links,
        "speeds": speeds,
    }
    for name, length in {**lengths, "links": between, "speeds": schedule.ranks}.items():
        values = values_by_name[name]
        if values is None:
            continue
        if len(values) != length:
            raise UsageError(
                f"{name} has {format_count(len(values), 'value')}: "
                f"for {schedule.name} here it needs {length}"
            )
        if name != "links" and any(
            not value >= 0 or value == float("inf") or (name == "speeds" and not value)
            for value in values
        ):
            raise UsageError(
                f"{name} is {list(values)}: each has to be finite, and "
                f"{'above 0' if name == 'speeds' else '0 or more'}"
            )
    if any(
        not link.latency_seconds >= 0 or not link.bytes_per_second > 0 for link in times.links or ()
    ):
        raise UsageError(
            f"links is {[tuple(link) for link in times.links or ()]}: each link needs a latency of "
            "0 or more, and more than 0 bytes per second"
        )


def make_even_times(
    schedule: PipelineSchedule, forward: float, backward: float, transfer: float = 0.0
) -> StageTimes:
    """Make times for equal stages; `forward` and `backward` are those of a whole rank, in seconds.

    So schedules with several stages on a rank compute as much as those with one. A message between
    two stages takes `transfer` seconds in all of them.
    """
    chunks = schedule.stages / schedule.ranks
    count, between = schedule.stages, schedule.stages - 1
    links = [LinkSpeed(0.0, 1.0)] * between
    return StageTimes(
        [forward / chunks] * count,
        [backward / chunks] * count,
        sends=[transfer] * between,
        links=links,
    )
