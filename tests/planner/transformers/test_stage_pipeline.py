"""Compiled schedules against the simulator, which they stand in for."""

from __future__ import annotations

import random

import pytest

from paceline.comm.schedule import LinkSpeed
from paceline.parallel.pipelining.schedule import count_kept
from paceline.parallel.pipelining.schedules import make_schedule
from paceline.parallel.pipelining.simulate import StageTimes, simulate_schedule
from paceline.planner.transformers.stage_pipeline import (
    StageSeconds,
    count_kept_stages,
    time_pipeline,
)

NAMES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zero-bubble", 1),
    ("zbv", 2),
]
SIZES = [(2, 2), (2, 5), (3, 7), (4, 4), (4, 13), (4, 32)]


def draw_times(stages: int, seed: int, *, even: bool = False) -> StageSeconds:
    draw = random.Random(seed)

    def row() -> tuple[float, ...]:
        return (
            (draw.uniform(0.5, 2.0),) * stages
            if even
            else tuple(draw.uniform(0.5, 2.0) for _ in range(stages))
        )

    return StageSeconds(row(), row(), row(), draw.choice([0.0, 0.1, 3.0 if not even else 0.2]))


def simulate(name: str, ranks: int, micro_batches: int, chunks: int, times: StageSeconds):  # type: ignore[no-untyped-def]
    schedule = make_schedule(name, ranks, micro_batches, chunks if name == "interleaved" else None)
    between = schedule.stages - 1
    return simulate_schedule(
        schedule,
        StageTimes(
            times.forwards,
            [a + b for a, b in zip(times.inputs, times.weights, strict=True)],
            times.inputs,
            times.weights,
            sends=[times.transfer] * between,
            links=[LinkSpeed(0.0, 1.0)] * between,
        ),
    )


@pytest.mark.parametrize(("name", "chunks"), NAMES)
@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_the_price_is_that_of_the_schedule_that_is_run(
    name: str, chunks: int, ranks: int, micro_batches: int
) -> None:
    for seed in range(3):
        times = draw_times(ranks * chunks, seed)
        timeline = simulate(name, ranks, micro_batches, chunks, times)
        seconds, idle = time_pipeline(name, ranks, micro_batches, chunks, times)
        assert seconds == pytest.approx(timeline.makespan)
        assert idle == pytest.approx(timeline.bubble)


@pytest.mark.parametrize(("name", "chunks"), NAMES)
def test_equal_stages_find_a_rhythm(name: str, chunks: int) -> None:
    for ranks, micro_batches in ((4, 64), (4, 40), (8, 88)):
        times = draw_times(ranks * chunks, ranks, even=True)
        quick = time_pipeline(name, ranks, micro_batches, chunks, times, exact=False)
        assert quick == pytest.approx(time_pipeline(name, ranks, micro_batches, chunks, times))


@pytest.mark.parametrize(("name", "chunks"), NAMES)
def test_unequal_stages_are_nearly_right(name: str, chunks: int) -> None:
    for seed in range(5):
        times = draw_times(4 * chunks, seed)
        quick, _ = time_pipeline(name, 4, 61, chunks, times, exact=False)
        assert quick == pytest.approx(time_pipeline(name, 4, 61, chunks, times)[0], rel=0.15)


@pytest.mark.parametrize(("name", "chunks"), NAMES)
@pytest.mark.parametrize(("ranks", "micro_batches"), [*SIZES, (4, 1), (4, 6), (3, 2)])
def test_kept_activations_are_those_of_the_schedule(
    name: str, chunks: int, ranks: int, micro_batches: int
) -> None:
    schedule = make_schedule(name, ranks, micro_batches, chunks if name == "interleaved" else None)
    assert [
        count_kept_stages(name, ranks, micro_batches, chunks, rank) for rank in range(ranks)
    ] == count_kept(schedule)


def test_a_pipeline_by_hand() -> None:
    # 3m + 3(p-1) for 1f1b, 3m + (p-1) for zero-bubble: see `schedules`.
    times = StageSeconds((1.0,) * 4, (1.0,) * 4, (1.0,) * 4, 0.0)
    assert time_pipeline("1f1b", 4, 8, 1, times) == pytest.approx((33, 9 / 33))
    assert time_pipeline("zero-bubble", 4, 8, 1, times)[0] == pytest.approx(27)
