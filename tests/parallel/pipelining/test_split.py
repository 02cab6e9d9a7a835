"""Which layers go to which stage: against all splits there are, tried one by one."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from paceline.comm.schedule import LinkSpeed
from paceline.errors import UsageError
from paceline.parallel.pipelining.schedule import PipelineSchedule
from paceline.parallel.pipelining.schedules import make_schedule
from paceline.parallel.pipelining.simulate import simulate_schedule
from paceline.parallel.pipelining.split import (
    LayerCost,
    SplitProblem,
    check_split,
    find_best_split,
    list_splits,
    make_even_split,
    minimise_slowest_stage,
)

pytestmark = pytest.mark.unit

SCHEDULES = [
    ("gpipe", 2, 3, None),
    ("1f1b", 3, 4, None),
    ("zero-bubble", 2, 4, None),
    ("interleaved", 2, 4, 2),
    ("zbv", 2, 4, None),
    ("1f1b", 1, 2, None),
]


def layers(*seconds: float, **sizes: int) -> list[LayerCost]:
    return [LayerCost(f"layer {at}", one, 2 * one, **sizes) for at, one in enumerate(seconds)]


@some.composite
def problems(draw: some.DrawFn, memory: bool) -> SplitProblem:
    schedule = make_schedule(*draw(some.sampled_from(SCHEDULES)))
    number = draw(some.integers(schedule.stages, 8))
    whole, size = some.integers(1, 9), some.integers(0, 50)
    costs = [
        LayerCost(
            f"layer {at}",
            draw(whole),
            draw(whole),
            draw(size),
            draw(size),
            draw(size),
            draw(size),
            draw(size),
        )
        for at in range(number)
    ]
    speeds = draw(
        some.lists(
            some.sampled_from([0.5, 1.0, 2.0]), min_size=schedule.ranks, max_size=schedule.ranks
        )
    )
    room = (
        draw(some.lists(some.integers(50, 1200), min_size=schedule.ranks, max_size=schedule.ranks))
        if memory
        else None
    )
    links = [LinkSpeed(0.5, draw(some.sampled_from([2.0, 10.0, 100.0])))] * (schedule.stages - 1)
    return SplitProblem(
        costs, schedule, speeds, room, links, draw(some.sampled_from([0.0, 1.0, 2.0]))
    )


def slowest(problem: SplitProblem, counts: list[int]) -> float:
    """The seconds of the slowest stage or link, counted by hand."""
    found = []
    for stage, (start, stop) in enumerate(pairwise([0, *accumulate(counts)])):
        rank, part = problem.schedule.placed[stage], problem.costs[start:stop]
        found.append(
            sum(cost.forward_seconds + cost.backward_seconds for cost in part)
            / problem.speeds[rank]
        )
        if stage < len(counts) - 1 and problem.schedule.placed[stage + 1] != rank and problem.links:
            found += [
                nbytes / problem.links[stage].bytes_per_second
                for nbytes in (part[-1].sends, part[-1].returns)
            ]
    return max(found)


def fits(problem: SplitProblem, counts: list[int]) -> bool:
    """Whether all workers have the memory, followed action by action."""
    if problem.memory is None:
        return True
    parts = [problem.costs[start:stop] for start, stop in pairwise([0, *accumulate(counts)])]
    for rank, row in enumerate(problem.schedule.rows):
        mine = [cost for stage in problem.schedule.stages_of_rank(rank) for cost in parts[stage]]
        state = sum(
            cost.parameters + round(cost.trained * (1 + problem.remembered)) for cost in mine
        )
        kept = most = 0
        for action in row:
            size = sum(cost.kept for cost in parts[action.stage]) + (
                parts[action.stage - 1][-1].sends if action.stage else 0
            )
            kept += (
                size
                if action.kind == "forward"
                else -size
                if action.kind in ("backward", "weight")
                else 0
            )
            most = max(most, kept)
        if state + most > problem.memory[rank]:
            return False
    return True


@settings(max_examples=60, deadline=None)
@given(problems(memory=False) | problems(memory=True))
def test_no_split_is_better_than_the_one_found(problem: SplitProblem) -> None:
    possible = [
        counts
        for counts in list_splits(len(problem.costs), problem.schedule.stages)
        if fits(problem, counts)
    ]
    found = minimise_slowest_stage(problem)
    if not possible:
        assert found is None
        with pytest.raises(UsageError, match="no split of these"):
            find_best_split(problem)
        return
    assert found in possible
    assert slowest(problem, found) == pytest.approx(
        min(slowest(problem, counts) for counts in possible)
    )
    best = find_best_split(problem)
    assert best in possible
    spans = {
        tuple(counts): simulate_schedule(
            problem.schedule, problem.stage_times(counts), problem.speeds
        ).makespan
        for counts in possible
    }
    assert spans[tuple(best)] <= min(spans.values()) * 1.001


def test_all_splits_are_tried() -> None:
    assert list(list_splits(4, 2)) == [[1, 3], [2, 2], [3, 1]]
    assert len(list(list_splits(8, 4))) == 35 and all(
        sum(counts) == 8 and min(counts) > 0 for counts in list_splits(8, 4)
    )


def test_a_worker_at_half_speed_gets_half_the_layers() -> None:
    problem = SplitProblem(layers(*[1.0] * 12), make_schedule("1f1b", 2, 16), [1.0, 0.5])
    assert find_best_split(problem) == [8, 4]
    assert find_best_split(
        SplitProblem(layers(*[1.0] * 12), make_schedule("1f1b", 2, 16), [0.5, 1.0])
    ) == [4, 8]


def test_a_large_head_counts_as_what_it_takes() -> None:
    problem = SplitProblem(layers(0.1, *[1.0] * 8, 4.0), make_schedule("1f1b", 2, 16), [1.0, 1.0])
    best = find_best_split(problem)
    assert best == [7, 3] != make_even_split(10, 2)
    assert (
        problem.simulate_split(best).makespan
        < problem.simulate_split(make_even_split(10, 2)).makespan
    )


def test_a_slow_link_moves_the_boundary_to_where_less_crosses() -> None:
    costs = [
        LayerCost(str(at), 1.0, 2.0, sends=size, returns=size)
        for at, size in enumerate([900, 100, 900, 900])
    ]
    schedule = make_schedule("1f1b", 2, 8)
    assert find_best_split(SplitProblem(costs, schedule, [1.0, 1.0])) == [2, 2]
    costs = [
        LayerCost(str(at), 1.0, 2.0, sends=size, returns=size)
        for at, size in enumerate([100, 900, 900, 900])
    ]
    assert find_best_split(
        SplitProblem(costs, schedule, [1.0, 1.0], links=[LinkSpeed(0.0, 50.0)])
    ) == [
        1,
        3,
    ]


def many(name: str, ranks: int, chunks: int | None) -> tuple[PipelineSchedule, list[LayerCost]]:
    schedule = make_schedule(name, ranks, 2 * ranks, chunks)
    seconds = [1.0 + (at * at % 7) / 5 for at in range(6 * schedule.stages)]
    return schedule, layers(0.1, *seconds, 3.0, parameters=10, trained=10, kept=5)


@pytest.mark.alike(2)
@pytest.mark.parametrize(
    ("name", "ranks", "chunks"), [("interleaved", 4, 2), ("zbv", 4, None), ("1f1b", 8, None)]
)
def test_too_many_splits_to_try_all(name: str, ranks: int, chunks: int | None) -> None:
    schedule, costs = many(name, ranks, chunks)
    free = SplitProblem(costs, schedule, [1.0] * ranks)
    best = find_best_split(free)
    span = free.simulate_split(best).makespan
    assert span <= free.simulate_split(make_even_split(len(costs), schedule.stages)).makespan
    assert span <= free.simulate_split(minimise_slowest_stage(free) or []).makespan
    tight = SplitProblem(
        costs, schedule, [1.0] * ranks, memory=[0.95 * max(free.memory_bytes(best))] * ranks
    )
    assert not tight.fits_memory(best)
    assert tight.fits_memory(find_best_split(tight))


def test_no_split_fits_into_too_little_memory() -> None:
    problem = SplitProblem(
        layers(*[1.0] * 4, parameters=1000, trained=1000, kept=500),
        make_schedule("1f1b", 2, 4),
        [1.0, 1.0],
        memory=[9000, 9000],
    )
    words = (
        r"needs least, \[2, 2\], takes 10.0 KB on worker 0, which has 9.0 KB \(8.0 KB for "
        r"parameters, .*, 2.0 KB for activations\)"
    )
    with pytest.raises(UsageError, match=words):
        find_best_split(problem)


def test_splits_written_by_hand() -> None:
    assert check_split([3, 1], ["a", "b", "c", "d"], 2) == [3, 1]
    for wrong in ([3, 2], [4, 0], [4], [2, 1, 1]):
        with pytest.raises(
            UsageError,
            match=r"doesn't deal 4 layers to 2 stages: it needs 2 numbers .* such as \[2, 2\]",
        ):
            check_split(wrong, ["a", "b", "c", "d"], 2)
    assert make_even_split(11, 4) == [3, 3, 3, 2]


def test_what_makes_no_problem_is_refused() -> None:
    schedule = make_schedule("1f1b", 3, 4)
    with pytest.raises(UsageError, match="2 layers can't fill 3 stages"):
        SplitProblem(layers(1, 1), schedule, [1.0] * 3)
    with pytest.raises(UsageError, match="speeds has 2 values; here it needs 3"):
        SplitProblem(layers(1, 1, 1), schedule, [1.0] * 2)
    with pytest.raises(UsageError, match="each has to be above 0"):
        SplitProblem(layers(1, 1, 1), schedule, [1.0, 0.0, 1.0])
