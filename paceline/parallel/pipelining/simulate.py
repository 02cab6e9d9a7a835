"""Runs a schedule on given times, without a process: when each action begins and ends, the bubble,
and what each rank keeps.

rank 0   F0 F1 F2 .  .  .  B0 --       a rank does one action at a time, in the order of its row
           \\           /               what it has made travels while it goes on
rank 1   .  .  F0 B0 -- F1 B1 --
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.comm.schedule import LinkSpeed
from paceline.errors import UsageError
from paceline.formatting import counted
from paceline.parallel.pipelining.schedule import (
    Action,
    Kind,
    PipelineSchedule,
    in_order,
    most_kept,
)

INSTANT = LinkSpeed(0.0, float("inf"))


@dataclass(frozen=True)
class StageTimes:
    """What one micro-batch takes in each stage, and between stages: seconds on a rank of speed 1,
    and bytes.

    `input_backwards` and `weight_backwards` are what the halves of a split backward take; without
    them each is half of it. `kept` are the bytes of activations that a stage keeps for its
    backward. The others have a value for each boundary between a stage and the next: `sends` are
    the bytes that go over it, `returns` those of gradients that come back, or as many, and `links`
    is over what.
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
        """Return what an action takes on a rank of speed 1."""
        if kind == "forward":
            return self.forwards[stage]
        whole = self.backwards[stage]
        if kind == "input":
            return whole / 2 if self.input_backwards is None else self.input_backwards[stage]
        if kind == "weight":
            return whole / 2 if self.weight_backwards is None else self.weight_backwards[stage]
        return whole

    def nbytes(self, boundary: int, *, back: bool) -> float:
        """Return how much goes over a boundary for one micro-batch, or comes back over it."""
        chosen = self.returns if back and self.returns is not None else self.sends
        return 0.0 if chosen is None else chosen[boundary]


@dataclass(frozen=True)
class ActionSpan:
    """An action, and when it begins and ends, in seconds."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Transfer:
    """What `action` has made, on its way from the rank `source` to the rank `target`: when it
    leaves, and when all of it is there.
    """

    action: Action
    source: int
    target: int
    start: float
    end: float
    nbytes: float


@dataclass(frozen=True)
class PipelineTimeline:
    """A schedule with the times of all of its actions, one row for each rank, and of what
    travels between ranks. Begins at 0.
    """

    schedule: PipelineSchedule
    rows: tuple[tuple[ActionSpan, ...], ...]
    transfers: tuple[Transfer, ...]
    kept_bytes: tuple[float, ...]
    """The bytes of activations that each rank keeps at once at most."""

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
        """The part of the time of all ranks in which they have nothing to do, from 0 to 1."""
        return sum(self.idle) / (self.schedule.ranks * self.makespan) if self.makespan else 0.0

    @property
    def kept(self) -> tuple[float, ...]:
        """The micro-batches whose activations each rank keeps at once at most; one in one of two
        stages of a rank is half of one.
        """
        schedule = self.schedule
        return tuple(
            count / len(schedule.held(rank)) for rank, count in enumerate(most_kept(schedule))
        )


def simulate(
    schedule: PipelineSchedule, times: StageTimes, speeds: Sequence[float] | None = None
) -> PipelineTimeline:
    """Run a schedule on given times; `speeds` has for each rank how much faster it computes than a
    rank of speed 1.

    A rank begins an action when it is through with the one before, and all that it needs has come.
    Transfers run beside computing. Those from one rank to another leave one after another, each
    once it is made and the link is free; it holds the link for its bytes, and is there a latency
    later. Nothing travels between two stages of one rank. UsageError where times don't fit the
    schedule.
    """
    speeds = [1.0] * schedule.ranks if speeds is None else speeds
    _fit(schedule, times, speeds)
    there: dict[Action, float] = {}  # when the stage that needs what an action makes has it
    clock = [0.0] * schedule.ranks
    free: dict[tuple[int, int], float] = {}  # when the link from one rank to another is free again
    rows: list[list[ActionSpan]] = [[] for _ in range(schedule.ranks)]
    transfers = []
    # what takes a link comes from one rank, in the order of its row: any order of ranks will do
    for rank, action in in_order(schedule):
        start = max(
            [
                clock[rank],
                *(there[need] for need in schedule.needs(action) if need.stage != action.stage),
            ]
        )
        clock[rank] = start + times.seconds(action.kind, action.stage) / speeds[rank]
        rows[rank].append(ActionSpan(action, start, clock[rank]))
        there[action] = clock[rank]
        stage = schedule.target(action)
        if stage is not None and (way := (rank, schedule.placed[stage])) != (rank, rank):
            boundary = min(stage, action.stage)
            link = INSTANT if times.links is None else times.links[boundary]
            nbytes = times.nbytes(boundary, back=stage < action.stage)
            leaves = max(clock[rank], free.get(way, 0.0))
            free[way] = leaves + nbytes / link.bytes_per_second
            there[action] = free[way] + link.latency_seconds
            transfers.append(Transfer(action, *way, leaves, there[action], nbytes))
    kept = [0.0] * schedule.ranks if times.kept is None else most_kept(schedule, times.kept)
    return PipelineTimeline(schedule, tuple(map(tuple, rows)), tuple(transfers), tuple(kept))


def _fit(schedule: PipelineSchedule, times: StageTimes, speeds: Sequence[float]) -> None:
    """Raise UsageError where there are too few or too many times, or some can't be."""
    stages, between = schedule.stages, schedule.stages - 1
    wanted = dict.fromkeys(
        ("forwards", "backwards", "input_backwards", "weight_backwards", "kept"), stages
    )
    wanted |= {"sends": between, "returns": between}
    given = {name: getattr(times, name) for name in wanted} | {
        "links": times.links,
        "speeds": speeds,
    }
    for name, number in {**wanted, "links": between, "speeds": schedule.ranks}.items():
        values = given[name]
        if values is None:
            continue
        if len(values) != number:
            raise UsageError(
                f"{name} has {counted(len(values), 'value')}: for {schedule.name} here it has to "
                f"have {number}"
            )
        if name != "links" and any(
            not value >= 0 or value == float("inf") or (name == "speeds" and not value)
            for value in values
        ):
            raise UsageError(
                f"{name} is {list(values)}: "
                f"a number of them is no {'speed' if name == 'speeds' else 'time or size'}"
            )
    if any(
        not link.latency_seconds >= 0 or not link.bytes_per_second > 0 for link in times.links or ()
    ):
        raise UsageError(
            f"links is {[tuple(link) for link in times.links or ()]}: a link has a latency of 0 or "
            "more, and takes bytes"
        )


def even_times(
    schedule: PipelineSchedule, forward: float, backward: float, transfer: float = 0.0
) -> StageTimes:
    """Return times for stages that are all alike: `forward` and `backward` of all that a rank
    holds, and of what travels between stages.

    So schedules with several stages on a rank have as much to do as those with one. But they send
    as much between any two stages.
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
