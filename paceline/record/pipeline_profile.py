"""What the steps of a pipeline were, put together from what its workers have measured; and what
they would be with other terms.

worker 0    F0 F1 .  .  B0 B1         its actions, each with the wait before it, on its own clock
worker 1    .  F0 B0 F1 B1 .
              -> the bubble measured; the medians of actions and messages; and the same schedule
              simulated with these medians

Times are seconds. Reading a profile takes no torch.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, NamedTuple

from paceline.comm.schedule import LinkSpeed
from paceline.parallel.pipelining.schedule import Action, PipelineSchedule
from paceline.parallel.pipelining.schedules import make_schedule
from paceline.parallel.pipelining.simulate import ActionSpan, PipelineTimeline, StageTimes, simulate
from paceline.parallel.pipelining.split import LayerCost, SplitProblem
from paceline.record.timeline import ClockOffset

WAITED: Final = 50_000  # nanoseconds: a shorter wait doesn't show when a message came
# a transfer is told to the simulator as so many bytes for each second, over a link that takes so
# many a second
UNIT: Final = 1e9


@dataclass(frozen=True)
class StageProfile:
    """One stage of a pipeline.

    `seconds`: of a micro-batch, by kind of action; `waited`: before all actions of a step.
    """

    layers: tuple[str, ...]
    layer_seconds: tuple[float, ...]  # of their forwards, as measured in one step
    rank: int  # of the run
    seconds: dict[str, float]
    waited: float
    kept: int  # bytes of a micro-batch, from its forward to its backward

    def dealt(self, kind: str) -> list[float]:
        """Return the seconds of an action by layer, in proportion to their forwards."""
        whole = sum(self.layer_seconds)
        shares = (
            [each / whole for each in self.layer_seconds]
            if whole
            else [1 / len(self.layers)] * len(self.layers)
        )
        return [share * self.seconds.get(kind, 0.0) for share in shares]


@dataclass(frozen=True)
class PipelineProfile:
    """A pipeline of a run, medians over `steps` steps.

    `ranks` are those of the run, by their place along `stage`.

    `sends` and `returns` are what messages take over each boundary between a stage and the next;
    None where nobody had to wait for one.
    """

    schedule: str
    chunks: int | None
    micro_batches: int
    ranks: tuple[int, ...]
    stages: tuple[StageProfile, ...]
    sends: tuple[float | None, ...]
    returns: tuple[float | None, ...]
    steps: int
    step_seconds: float  # from the first action of any worker to the last of any
    bubble: float
    idle: tuple[float, ...]  # of each worker

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> PipelineProfile:
        """Read what `fields` has made.

        Raises KeyError, ValueError or TypeError for anything else.
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

    def fields(self) -> dict[str, Any]:
        """Return the fields that `summary.json` has of it, the predicted bubble and the bytes
        that each worker keeps among them.
        """
        found = self.timeline
        return {
            **asdict(self),
            "bubble": {"measured": self.bubble, "predicted": found.bubble},
            "predicted_step_seconds": found.makespan,
            "kept_at_most": list(found.kept_bytes),
        }

    @cached_property
    def plan(self) -> PipelineSchedule:
        """The schedule that was run."""
        return make_schedule(self.schedule, len(self.ranks), self.micro_batches, self.chunks)

    @property
    def split(self) -> list[int]:
        """The number of layers of each stage."""
        return [len(stage.layers) for stage in self.stages]

    @cached_property
    def timeline(self) -> PipelineTimeline:
        """The schedule, simulated with the medians measured."""
        whole = [stage.seconds for stage in self.stages]
        halves = [[each.get(kind, 0.0) for each in whole] for kind in ("input", "weight")]
        backwards = [
            each.get("backward", each.get("input", 0.0) + each.get("weight", 0.0)) for each in whole
        ]
        times = StageTimes(
            forwards=[each["forward"] for each in whole],
            backwards=backwards,
            input_backwards=halves[0] if self.plan.split else None,
            weight_backwards=halves[1] if self.plan.split else None,
            kept=[stage.kept for stage in self.stages],
            sends=[each or 0.0 for each in self.sends],
            returns=[each or 0.0 for each in self.returns],
            links=[LinkSpeed(0.0, 1.0)] * len(self.sends),
        )
        return simulate(self.plan, times)

    @cached_property
    def costs(self) -> list[LayerCost]:
        """What each layer takes for a micro-batch, as far as it is known: a stage's times, dealt
        to its layers as their forwards are.
        """
        sends, returns = (_known(each) for each in (self.sends, self.returns))
        found = list[LayerCost]()
        for number, stage in enumerate(self.stages):
            backward = [
                sum(each)
                for each in zip(
                    *(stage.dealt(kind) for kind in ("backward", "input", "weight")), strict=True
                )
            ]
            for name, ahead, back in zip(
                stage.layers, stage.dealt("forward"), backward, strict=True
            ):
                found.append(
                    LayerCost(
                        name,
                        ahead,
                        back,
                        sends=round(sends[-1] * UNIT),
                        returns=round(returns[-1] * UNIT),
                    )
                )
            if number < len(self.sends):
                end = LayerCost(
                    **{
                        **asdict(found[-1]),
                        "sends": round(sends[number] * UNIT),
                        "returns": round(returns[number] * UNIT),
                    }
                )
                found[-1] = end
        return found

    def problem(self, schedule: PipelineSchedule) -> SplitProblem:
        """Return these layers as what a schedule's stages are to have, over workers that are
        taken to be alike.
        """
        links = [LinkSpeed(0.0, UNIT)] * (schedule.stages - 1)
        return SplitProblem(self.costs, schedule, [1.0] * schedule.ranks, links=links)


def _known(transfers: Sequence[float | None]) -> list[float]:
    """Return transfers with the median of those that are known in the place of others, and after
    all of them.
    """
    usual = statistics.median([each for each in transfers if each is not None] or [0.0])
    return [*(usual if each is None else each for each in transfers), usual]


class _Times(NamedTuple):
    """When an action began, had all that it needs, and ended: nanoseconds on the clock of rank
    0.
    """

    began: int
    ready: int
    ended: int


class _Step:
    """One step of all workers."""

    def __init__(self, schedule: PipelineSchedule, rows: Sequence[Sequence[_Times]]) -> None:
        self._schedule = schedule
        self.at = {
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
        return PipelineTimeline(self._schedule, self.spans, (), ())

    def transfer(self, source: int, target: int) -> float | None:
        """Return what the fastest message from a stage to its neighbour took of those that were
        waited for.
        """
        took = []
        for action, time in self.at.items():
            if (
                action.kind == "weight"
                or action.stage != target
                or (action.kind == "forward") != (source < target)
            ):
                continue
            made = self.at.get(Action(action.kind, source, action.micro_batch))
            if made is not None and time.ready - time.began > WAITED:
                took.append(max(time.ready - made.ended, 0) / 1e9)
        return min(took, default=None)

    def waited(self, stage: int) -> float:
        return (
            sum(
                time.ready - time.began for action, time in self.at.items() if action.stage == stage
            )
            / 1e9
        )


def combine(
    workers: Sequence[Mapping[str, Any]], ranks: Sequence[int], offsets: Sequence[ClockOffset]
) -> PipelineProfile | None:
    """Put together what the workers of one pipeline have measured, in their order along `stage`;
    None where no step was kept.

    `ranks` are theirs in the run, `offsets` how far the clock of each is ahead.
    """
    terms = workers[0]
    usual = Counter(count for _, count, _ in terms["steps"]).most_common(1)
    if not usual:
        return None
    micro_batches = int(usual[0][0])
    schedule = make_schedule(terms["schedule"], len(workers), micro_batches, terms["chunks"])
    rows = [
        {number: times for number, count, times in each["steps"] if count == micro_batches}
        for each in workers
    ]
    both = sorted(set(rows[0]).intersection(*rows[1:]))
    ahead = [offset.ahead for offset in offsets]
    steps = [
        _Step(
            schedule,
            [
                [_Times(*(at - by for at in time)) for time in row[number]]
                for row, by in zip(rows, ahead, strict=True)
            ],
        )
        for number in both
        if all(len(row[number]) == len(plan) for row, plan in zip(rows, schedule.rows, strict=True))
    ]
    if not steps:
        return None
    timelines = [step.timeline for step in steps]
    boundaries = [pair for pair in pairwise(range(schedule.stages))]
    return PipelineProfile(
        schedule=str(terms["schedule"]),
        chunks=terms["chunks"],
        micro_batches=micro_batches,
        ranks=tuple(ranks),
        stages=tuple(
            _stage(workers, schedule, steps, ranks, stage) for stage in range(schedule.stages)
        ),
        sends=tuple(
            _median(step.transfer(low, high) for step in steps) for low, high in boundaries
        ),
        returns=tuple(
            _median(step.transfer(high, low) for step in steps) for low, high in boundaries
        ),
        steps=len(steps),
        step_seconds=statistics.median(each.makespan for each in timelines),
        bubble=statistics.median(each.bubble for each in timelines),
        idle=tuple(
            statistics.median(each.idle[place] for each in timelines) for place in range(len(ranks))
        ),
    )


def _stage(
    workers: Sequence[Mapping[str, Any]],
    schedule: PipelineSchedule,
    steps: Sequence[_Step],
    ranks: Sequence[int],
    stage: int,
) -> StageProfile:
    place = schedule.placed[stage]
    mine = workers[place]
    start, stop = mine["bounds"][stage : stage + 2]
    took: dict[str, list[float]] = {}
    for step in steps:
        for action, time in step.at.items():
            if action.stage == stage:
                took.setdefault(action.kind, []).append((time.ended - time.ready) / 1e9)
    return StageProfile(
        layers=tuple(mine["layers"][start:stop]),
        layer_seconds=tuple(
            float(mine["layer_seconds"].get(layer, 0.0)) for layer in range(start, stop)
        ),
        rank=ranks[place],
        seconds={kind: statistics.median(seconds) for kind, seconds in took.items()},
        waited=statistics.median(step.waited(stage) for step in steps),
        kept=int(mine["kept"].get(stage, 0)),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
