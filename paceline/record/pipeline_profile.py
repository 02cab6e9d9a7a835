"""Combines what the workers of a pipeline have measured into a profile of its steps.

worker 0    F0 F1 .  .  B0 B1         each action with the wait before it, on the worker's own clock
worker 1    .  F0 B0 F1 B1 .
              -> the measured bubble, medians of actions and messages, and a simulation of the same
                 schedule with these medians

The profile can then be simulated with another schedule or split. Times are in seconds. Reading a
profile does not import torch.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, NamedTuple

from paceline.comm.schedule import LinkSpeed
from paceline.parallel.pipelining.schedule import Action, PipelineSchedule
from paceline.parallel.pipelining.schedules import make_schedule
from paceline.parallel.pipelining.simulate import (
    ActionSpan,
    PipelineTimeline,
    StageTimes,
    simulate_schedule,
)
from paceline.parallel.pipelining.split import LayerCost, SplitProblem
from paceline.record.timeline import ClockOffset

# Nanoseconds. After a shorter wait, the message may have been there before.
MIN_WAIT_NANOSECONDS: Final = 50_000
# Transfers are known in seconds, and the simulator takes bytes. One second becomes this many bytes,
# over a link that carries this many bytes per second.
BYTES_PER_SECOND: Final = 1e9


@dataclass(frozen=True)
class StageProfile:
    """One stage of a pipeline.

    Attributes:
        layers: Names of its layers.
        layer_seconds: Seconds of the forward of each layer, as measured in one step.
        rank: Rank of its worker in the run.
        seconds: Seconds of a micro-batch, by kind of action.
        waited: Seconds of waiting before all of its actions in a step.
        kept: Bytes that a micro-batch keeps from its forward to its backward.
    """

    layers: tuple[str, ...]
    layer_seconds: tuple[float, ...]
    rank: int
    seconds: dict[str, float]
    waited: float
    kept: int

    def divide_among_layers(self, kind: str) -> list[float]:
        """Divide the seconds of an action among the layers, in proportion to their forwards."""
        total = sum(self.layer_seconds)
        shares = (
            [each / total for each in self.layer_seconds]
            if total
            else [1 / len(self.layers)] * len(self.layers)
        )
        return [share * self.seconds.get(kind, 0.0) for share in shares]


@dataclass(frozen=True)
class PipelineProfile:
    """A pipeline of a run: medians over `steps` steps.

    `ranks` are those of the run, by their place along the axis `stage`. `sends` and `returns` are
    the seconds of a message over each boundary between two stages, forwards and backwards; None if
    no worker had to wait for one.
    """

    schedule: str
    chunks: int | None
    micro_batches: int
    ranks: tuple[int, ...]
    stages: tuple[StageProfile, ...]
    sends: tuple[float | None, ...]
    returns: tuple[float | None, ...]
    steps: int
    # From the first action of any worker to the last action of any worker.
    step_seconds: float
    bubble: float
    idle: tuple[float, ...]  # of each worker

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> PipelineProfile:
        """Read a profile from the output of `to_fields`.

        Raises:
            KeyError, ValueError, TypeError: The fields are not those of a profile.
        """
        stages = tuple(
            StageProfile(
                tuple(map(str, each["layers"])),
                tuple(map(float, each["layer_seconds"])),
                int(each["rank"]),
                {str(kind): float(seconds) for kind, seconds in each["seconds"].items()},
                float(each["waited"]),
                int(each["kept"]),
            )
            for each in fields["stages"]
        )
        measured = fields["bubble"]
        return cls(
            schedule=str(fields["schedule"]),
            chunks=None if fields["chunks"] is None else int(fields["chunks"]),
            micro_batches=int(fields["micro_batches"]),
            ranks=tuple(map(int, fields["ranks"])),
            stages=stages,
            sends=tuple(None if each is None else float(each) for each in fields["sends"]),
            returns=tuple(None if each is None else float(each) for each in fields["returns"]),
            steps=int(fields["steps"]),
            step_seconds=float(fields["step_seconds"]),
            bubble=float(measured["measured"]),
            idle=tuple(map(float, fields["idle"])),
        )

    def to_fields(self) -> dict[str, Any]:
        """Return the fields for `summary.json`.

        They include the predicted bubble, and the bytes that each worker keeps at most.
        """
        simulated = self.simulated_timeline
        return {
            **asdict(self),
            "bubble": {"measured": self.bubble, "predicted": simulated.bubble},
            "predicted_step_seconds": simulated.makespan,
            "kept_at_most": list(simulated.kept_bytes),
        }

    @cached_property
    def schedule_plan(self) -> PipelineSchedule:
        """The schedule of the run, as a plan of actions."""
        return make_schedule(self.schedule, len(self.ranks), self.micro_batches, self.chunks)

    @property
    def layer_counts(self) -> list[int]:
        """Number of layers of each stage."""
        return [len(stage.layers) for stage in self.stages]

    @cached_property
    def simulated_timeline(self) -> PipelineTimeline:
        """The schedule, simulated with the measured medians."""
        seconds_by_stage = [stage.seconds for stage in self.stages]
        halves = [
            [each.get(kind, 0.0) for each in seconds_by_stage] for kind in ("input", "weight")
        ]
        backwards = [
            each.get("backward", each.get("input", 0.0) + each.get("weight", 0.0))
            for each in seconds_by_stage
        ]
        times = StageTimes(
            forwards=[each["forward"] for each in seconds_by_stage],
            backwards=backwards,
            input_backwards=halves[0] if self.schedule_plan.splits_backward else None,
            weight_backwards=halves[1] if self.schedule_plan.splits_backward else None,
            kept=[stage.kept for stage in self.stages],
            sends=[each or 0.0 for each in self.sends],
            returns=[each or 0.0 for each in self.returns],
            links=[LinkSpeed(0.0, 1.0)] * len(self.sends),
        )
        return simulate_schedule(self.schedule_plan, times)

    @cached_property
    def layer_costs(self) -> list[LayerCost]:
        """Costs of each layer for a micro-batch, as far as they are known.

        A stage's times are divided among its layers in proportion to the layers' forwards.
        """
        sends, returns = (_fill_unknown(each) for each in (self.sends, self.returns))
        layer_costs = list[LayerCost]()
        for stage_index, stage in enumerate(self.stages):
            backward = [
                sum(each)
                for each in zip(
                    *(stage.divide_among_layers(kind) for kind in ("backward", "input", "weight")),
                    strict=True,
                )
            ]
            for name, ahead, back in zip(
                stage.layers, stage.divide_among_layers("forward"), backward, strict=True
            ):
                layer_costs.append(
                    LayerCost(
                        name,
                        ahead,
                        back,
                        sends=round(sends[-1] * BYTES_PER_SECOND),
                        returns=round(returns[-1] * BYTES_PER_SECOND),
                    )
                )
            # Only the boundary behind a stage was measured. Other layers get the usual transfer.
            if stage_index < len(self.sends):
                layer_costs[-1] = replace(
                    layer_costs[-1],
                    sends=round(sends[stage_index] * BYTES_PER_SECOND),
                    returns=round(returns[stage_index] * BYTES_PER_SECOND),
                )
        return layer_costs

    def make_split_problem(self, schedule: PipelineSchedule) -> SplitProblem:
        """Return the problem of splitting these layers over the stages of a schedule.

        Workers are assumed to be equally fast.
        """
        links = [LinkSpeed(0.0, BYTES_PER_SECOND)] * (schedule.stages - 1)
        return SplitProblem(self.layer_costs, schedule, [1.0] * schedule.ranks, links=links)


def _fill_unknown(transfers: Sequence[float | None]) -> list[float]:
    """Replace unknown transfers by the median of the known ones, and append that median."""
    usual = statistics.median([seconds for seconds in transfers if seconds is not None] or [0.0])
    return [*(usual if seconds is None else seconds for seconds in transfers), usual]


class _ActionTimes(NamedTuple):
    """Times of an action in nanoseconds on rank 0's clock: it began, had its inputs, ended."""

    began: int
    ready: int
    ended: int


class _MeasuredStep:
    """One measured step of all workers, on the clock of rank 0."""

    def __init__(self, schedule: PipelineSchedule, rows: Sequence[Sequence[_ActionTimes]]) -> None:
        self._schedule = schedule
        self.times_by_action = {
            action: time
            for row, times in zip(schedule.rows, rows, strict=True)
            for action, time in zip(row, times, strict=True)
        }
        first = min(row[0].ready for row in rows)
        self.spans = tuple(
            tuple(
                ActionSpan(action, (time.ready - first) / 1e9, (time.ended - first) / 1e9)
                for action, time in zip(row, times, strict=True)
            )
            for row, times in zip(schedule.rows, rows, strict=True)
        )

    @property
    def timeline(self) -> PipelineTimeline:
        """The measured step as a timeline."""
        return PipelineTimeline(self._schedule, self.spans, (), ())

    def fastest_transfer(self, source: int, target: int) -> float | None:
        """Return the seconds of the fastest message between two neighbouring stages.

        Only messages that were waited for count, because the arrival of others isn't known.
        """
        transfer_seconds = []
        for action, time in self.times_by_action.items():
            # A weight action receives nothing. Forwards receive from the stage before, backwards
            # from the one after.
            if (
                action.kind == "weight"
                or action.stage != target
                or (action.kind == "forward") != (source < target)
            ):
                continue
            sent = self.times_by_action.get(Action(action.kind, source, action.micro_batch))
            if sent is not None and time.ready - time.began > MIN_WAIT_NANOSECONDS:
                transfer_seconds.append(max(time.ready - sent.ended, 0) / 1e9)
        return min(transfer_seconds, default=None)

    def sum_waits(self, stage: int) -> float:
        """Return the seconds that a stage waited in this step."""
        return (
            sum(
                time.ready - time.began
                for action, time in self.times_by_action.items()
                if action.stage == stage
            )
            / 1e9
        )


def combine_workers(
    workers: Sequence[Mapping[str, Any]], ranks: Sequence[int], offsets: Sequence[ClockOffset]
) -> PipelineProfile | None:
    """Combine the measurements of the workers of one pipeline; None if no step was kept.

    Args:
        workers: Measurements of each worker, in their order along the axis `stage`.
        ranks: Ranks of these workers in the run.
        offsets: How far each worker's clock is ahead.
    """
    terms = workers[0]
    # Only steps with the usual number of micro-batches are comparable.
    most_common = Counter(count for _, count, _ in terms["steps"]).most_common(1)
    if not most_common:
        return None
    micro_batches = int(most_common[0][0])
    schedule = make_schedule(terms["schedule"], len(workers), micro_batches, terms["chunks"])
    steps = list(_match_steps(workers, schedule, offsets))
    if not steps:
        return None
    timelines = [step.timeline for step in steps]
    boundaries = list(pairwise(range(schedule.stages)))
    return PipelineProfile(
        schedule=str(terms["schedule"]),
        chunks=terms["chunks"],
        micro_batches=micro_batches,
        ranks=tuple(ranks),
        stages=tuple(
            _profile_stage(workers, schedule, steps, ranks, stage)
            for stage in range(schedule.stages)
        ),
        sends=tuple(
            _median_of_known(step.fastest_transfer(low, high) for step in steps)
            for low, high in boundaries
        ),
        returns=tuple(
            _median_of_known(step.fastest_transfer(high, low) for step in steps)
            for low, high in boundaries
        ),
        steps=len(steps),
        step_seconds=statistics.median(each.makespan for each in timelines),
        bubble=statistics.median(each.bubble for each in timelines),
        idle=tuple(
            statistics.median(each.idle[place] for each in timelines) for place in range(len(ranks))
        ),
    )


def _match_steps(
    workers: Sequence[Mapping[str, Any]],
    schedule: PipelineSchedule,
    offsets: Sequence[ClockOffset],
) -> Iterator[_MeasuredStep]:
    """Yield the steps with this schedule that all workers have measured, on one clock."""
    steps_by_worker = [
        {step: times for step, count, times in worker["steps"] if count == schedule.micro_batches}
        for worker in workers
    ]
    # A worker keeps the times of its last steps only, so a step counts if all workers have it.
    for number in sorted(set(steps_by_worker[0]).intersection(*steps_by_worker[1:])):
        rows = [times_by_step[number] for times_by_step in steps_by_worker]
        # A step that was broken off, or had another schedule, has other numbers of actions.
        if all(len(row) == len(plan) for row, plan in zip(rows, schedule.rows, strict=True)):
            shifted = [
                [_ActionTimes(*(at - offset.ahead for at in times)) for times in row]
                for row, offset in zip(rows, offsets, strict=True)
            ]
            yield _MeasuredStep(schedule, shifted)


def _profile_stage(
    workers: Sequence[Mapping[str, Any]],
    schedule: PipelineSchedule,
    steps: Sequence[_MeasuredStep],
    ranks: Sequence[int],
    stage: int,
) -> StageProfile:
    """Return the medians of one stage."""
    place = schedule.placed[stage]
    worker = workers[place]
    start, stop = worker["bounds"][stage : stage + 2]
    seconds_by_kind: dict[str, list[float]] = {}
    for step in steps:
        for action, time in step.times_by_action.items():
            if action.stage == stage:
                seconds_by_kind.setdefault(action.kind, []).append((time.ended - time.ready) / 1e9)
    return StageProfile(
        layers=tuple(worker["layers"][start:stop]),
        layer_seconds=tuple(
            float(worker["layer_seconds"].get(layer, 0.0)) for layer in range(start, stop)
        ),
        rank=ranks[place],
        seconds={kind: statistics.median(seconds) for kind, seconds in seconds_by_kind.items()},
        waited=statistics.median(step.sum_waits(stage) for step in steps),
        kept=int(worker["kept"].get(stage, 0)),
    )


def _median_of_known(values: Iterable[float | None]) -> float | None:
    """Return the median of the known values; None if there are none."""
    known_values = [value for value in values if value is not None]
    return statistics.median(known_values) if known_values else None
