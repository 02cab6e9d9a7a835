"""Seconds of a pipeline's schedule, many times a second: the schedule is compiled once.

The result is that of `simulate_schedule` for ranks of equal speed. The order of all actions is
found once for each schedule and size. After that a price is one pass over a list of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from paceline.parallel.pipelining.schedule import count_kept
from paceline.parallel.pipelining.schedules import FIXED_SCHEDULES, make_schedule

PERIODS = 3  # times `ranks` micro-batches, after which equal stages have found their rhythm
KINDS = ("forward", "backward", "input", "weight")


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one micro-batch in each stage, in the order of stages.

    Attributes:
        forwards: Of the forward.
        inputs: Of the backward's half for inputs.
        weights: Of its half for weights.
        transfer: Of a message between two stages.
    """

    forwards: tuple[float, ...]
    inputs: tuple[float, ...]
    weights: tuple[float, ...]
    transfer: float


@dataclass(frozen=True)
class _CompiledSchedule:
    """Steps of a schedule: rank, kind, stage, the step whose message it needs, lane of its own.

    The fourth number is -1 if nothing is needed from another stage, and the fifth one is -1 if
    nothing is sent to another rank.
    """

    steps: tuple[tuple[int, int, int, int, int], ...]
    ranks: int
    lanes: int


@lru_cache(maxsize=512)
def _compile_schedule(name: str, ranks: int, micro_batches: int, chunks: int) -> _CompiledSchedule:
    """Compile a schedule into numbers, in an order in which nothing waits for a later step."""
    # Schedules with a fixed number of stages know it themselves.
    schedule = make_schedule(
        name, ranks, micro_batches, None if name in FIXED_SCHEDULES else chunks
    )
    placed, last = schedule.placed, schedule.stages - 1
    lanes: dict[tuple[int, int], int] = {}
    steps: list[tuple[int, int, int, int, int]] = []
    # What is done: the number of the step, by kind, stage and micro-batch.
    done: dict[tuple[str, int, int], int] = {}
    at = [0] * ranks
    # Let each rank in turn go on as far as it can, as `order_actions` does. A forward needs the
    # stage before, a backward the stage behind; what a stage needs of its own is in its row before.
    while len(done) < sum(map(len, schedule.rows)):
        for rank, row in enumerate(schedule.rows):
            while at[rank] < len(row):
                action = row[at[rank]]
                kind, stage, micro_batch = action.kind, action.stage, action.micro_batch
                way = {"forward": 1, "weight": 0}.get(kind, -1)
                needs, source, target = -1, stage - way, stage + way
                if way and 0 <= source <= last:
                    needs = done.get((kind, source, micro_batch), -1)
                    if needs < 0:
                        break
                lane = -1
                if way and 0 <= target <= last and placed[target] != rank:
                    lane = lanes.setdefault((rank, placed[target]), len(lanes))
                done[kind, stage, micro_batch] = len(steps)
                steps.append((rank, KINDS.index(kind), stage, needs, lane))
                at[rank] += 1
    return _CompiledSchedule(tuple(steps), ranks, len(lanes))


@lru_cache(maxsize=20_000)
def time_pipeline(
    name: str,
    ranks: int,
    micro_batches: int,
    chunks: int,
    times: StageSeconds,
    *,
    exact: bool = True,
) -> tuple[float, float]:
    """Seconds of a schedule, and the share of all ranks' time in which they are idle.

    In the middle of a schedule further micro-batches take equal times. If a few per cent don't
    matter, as in a search, only the first are gone through, and the time of the others is added.

    Args:
        name: Name of the schedule.
        ranks: Workers along the pipeline.
        micro_batches: Micro-batches of a step.
        chunks: Stages on each worker.
        times: Seconds of each stage.
        exact: Whether all micro-batches are gone through.
    """
    size = micro_batches
    if not exact and micro_batches > (PERIODS + 1) * ranks:
        size = PERIODS * ranks + micro_batches % ranks
    seconds = _run_schedule(_compile_schedule(name, ranks, size, chunks), times)
    if size < micro_batches:
        before = _run_schedule(_compile_schedule(name, ranks, size - ranks, chunks), times)
        seconds += (seconds - before) * (micro_batches - size) / ranks
    busy = micro_batches * (sum(times.forwards) + sum(times.inputs) + sum(times.weights))
    return seconds, max(0.0, 1 - busy / (ranks * seconds))


def count_kept_stages(name: str, ranks: int, micro_batches: int, chunks: int, rank: int) -> int:
    """Count the activations of one stage that a rank keeps at once, at most.

    The same as `count_kept` counts, mostly without going through the schedule.
    """
    if name == "gpipe":
        return micro_batches
    if name == "1f1b":
        return min(micro_batches, ranks - rank)
    if name == "zero-bubble":
        return min(micro_batches, ranks)
    if name == "zbv":
        return (
            2 * ranks
            if micro_batches >= 2 * ranks - 1
            else _count_short_v(ranks, micro_batches)[rank]
        )
    # The micro-batches of a round, as in `make_interleaved`.
    count = max(1, micro_batches // ranks)
    first = -(-micro_batches // count)
    return min(micro_batches * chunks, (chunks - 1) * first + 2 * (ranks - 1 - rank) + 1)


@lru_cache(maxsize=1024)
def _count_short_v(ranks: int, micro_batches: int) -> tuple[int, ...]:
    """Count what each rank keeps under "zbv" if micro-batches don't fill the pipeline."""
    return tuple(map(int, count_kept(make_schedule("zbv", ranks, micro_batches))))


def _run_schedule(schedule: _CompiledSchedule, times: StageSeconds) -> float:
    """Run a compiled schedule as `simulate_schedule` does."""
    whole = tuple(a + b for a, b in zip(times.inputs, times.weights, strict=True))
    seconds: Sequence[tuple[float, ...]] = (times.forwards, whole, times.inputs, times.weights)
    clock, free = [0.0] * schedule.ranks, [0.0] * schedule.lanes
    available: list[float] = []
    add, transfer = available.append, times.transfer
    # Messages of a lane leave one after another. That only matters if one takes longer than what
    # the rank computes until the next.
    queued = transfer > min(*times.forwards, *times.inputs)
    for rank, kind, stage, needs, lane in schedule.steps:
        start = clock[rank]
        if needs >= 0 and available[needs] > start:
            start = available[needs]
        end = clock[rank] = start + seconds[kind][stage]
        if lane >= 0:
            if queued:
                end = max(end, free[lane])
                free[lane] = end + transfer
            end += transfer
        add(end)
    return max(clock)
