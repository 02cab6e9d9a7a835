"""The simulation of servers that fail, on timelines that can be drawn by hand."""

from __future__ import annotations

import math
import random
from itertools import islice, pairwise

import pytest

from benchmarks.goodput import make_response
from paceline.planner.budgets.failure_simulation import (
    Breakage,
    SimulatedRun,
    draw_breakages,
    follow_breakages,
    replay_trace,
    simulate_run,
)
from paceline.planner.budgets.failures import DAY, HOUR, Failures, FailureTrace, Outage
from paceline.planner.budgets.goodput import Division, FailureResponse, estimate_goodput


def follow(
    breakages: list[Breakage],
    division: Division,
    response: FailureResponse,
    *,
    period: float = 100.0,
    seconds: float = 1000.0,
) -> SimulatedRun:
    return follow_breakages(breakages, division, response, float, period=period, seconds=seconds)


def test_checkpoints_alone() -> None:
    """100 s of work and 10 s of saving, in turn: 9 whole cycles, and 10 s of work."""
    run = follow([], Division(4, 0, 1), make_response(save=10.0))
    assert run.samples == pytest.approx(4 * 910)
    assert run.time.checkpoint == pytest.approx(4 * 90)


def test_a_restart() -> None:
    """Work 100, save 10, work 50, x, stall 30: the 50 are lost."""
    response = make_response(save=10.0, restart=25.0, notice=5.0)
    run = follow([Breakage(160.0, (2,), 0.0)], Division(4, 0, 1), response, seconds=200.0)
    assert run.time.repeated == pytest.approx(4 * 50)
    assert run.time.stalled == pytest.approx(4 * 30)
    assert run.samples == pytest.approx(4 * (100 + 10))
    assert (run.failures, run.restarts) == (1, 1)
    assert run.most_samples == pytest.approx(4 * 150)


def test_a_failure_during_a_restart_begins_it_anew() -> None:
    response = make_response(restart=30.0)
    breakages = [Breakage(50.0, (0,), 0.0), Breakage(60.0, (1,), 0.0)]
    run = follow(breakages, Division(2, 0, 1), response, seconds=200.0)
    assert run.time.stalled == pytest.approx(2 * 40)
    assert run.time.repeated == pytest.approx(2 * 50)
    assert run.restarts == 1


def test_the_others_go_on() -> None:
    """Of 4, one is away from 100 to 300. They stall for 10 at its loss, and 20 as it joins."""
    response = make_response(heal=10.0, join=20.0, restart=500.0, save=0.0)
    run = follow([Breakage(100.0, (0,), 200.0)], Division(4, 0, 2), response, seconds=400.0)
    assert run.samples == pytest.approx(4 * 100 + 3 * 190 + 4 * 80)
    assert run.time.broken == pytest.approx(200)
    assert run.time.stalled == pytest.approx(3 * 10 + 4 * 20)
    assert run.restarts == 0


def test_a_standby_takes_its_place() -> None:
    response = make_response(heal=10.0, join=20.0)
    run = follow([Breakage(100.0, (0,), 200.0)], Division(4, 1, 2), response, seconds=400.0)
    assert run.samples == pytest.approx(4 * 390)
    # it stood by until 100, and the repaired one from 300 on
    assert run.time.standby == pytest.approx(100 + 100)


def test_a_job_that_can_not_shrink_waits() -> None:
    response = FailureResponse(0.0, 10.0, 20.0, 0.0, 0.0, 0.0, shrinks=False)
    run = follow([Breakage(100.0, (0,), 200.0)], Division(4, 0, 2), response, seconds=400.0)
    assert run.samples == pytest.approx(4 * (100 + 80))
    assert run.time.standby == pytest.approx(3 * 200)


@pytest.mark.parametrize(
    ("second", "moment", "restarts"), [(1, 105.0, 1), (2, 105.0, 0), (1, 115.0, 0), (3, 105.0, 1)]
)
def test_all_restart_if_both_holders_are_lost(second: int, moment: float, restarts: int) -> None:
    """Each part is on two neighbours. They have to be lost within the 10 s of healing."""
    breakages = [Breakage(100.0, (0,), 300.0), Breakage(moment, (second,), 300.0)]
    response = make_response(heal=10.0, restart=50.0)
    run = follow(breakages, Division(4, 0, 2), response, period=1000.0)
    assert run.restarts == restarts
    assert (run.time.repeated > 0) == bool(restarts)


def test_servers_of_a_group_hold_no_copies_of_each_other() -> None:
    """Two servers of a rack are lost at once. Their copies are in other racks."""
    response = make_response(heal=10.0, restart=50.0)
    for together, restarts in ((1, 1), (2, 0)):
        run = follow_breakages(
            [Breakage(100.0, (0, 1), 300.0)], Division(6, 0, 2), response, float,
            period=1000.0, seconds=500.0, together=together,
        )  # fmt: skip
        assert run.restarts == restarts


def test_time_is_conserved_whatever_happens() -> None:
    chance = random.Random(3)
    for seed in range(40):
        division = Division(chance.randint(1, 9), chance.randint(0, 3), chance.randint(1, 3))
        response = FailureResponse(*(chance.choice([0.0, 30.0, 2000.0]) for _ in range(6)), 0.01,
                                   chance.random() < 0.5)  # fmt: skip
        failures = Failures(chance.choice([1e-5, 1e-3]), "", together=chance.randint(1, 3))
        run = simulate_run(
            division, failures, response, float, period=500.0, seconds=1e5, seed=seed
        )
        assert math.fsum(run.time) == pytest.approx(division.servers * 1e5)
        assert min(run.time) >= 0 and run.samples <= division.train * 1e5 * (1 + 1e-9)


def test_a_seed_decides() -> None:
    runs = [
        simulate_run(
            Division(8, 1, 2), Failures(1 / DAY, ""), make_response(heal=60.0, replace=HOUR), float,
            period=HOUR, seconds=30 * DAY, seed=seed,
        )
        for seed in (1, 1, 2)
    ]  # fmt: skip
    assert runs[0] == runs[1] != runs[2]


def test_failures_are_as_frequent_as_they_should_be() -> None:
    for together in (1, 2):
        drawn = islice(draw_breakages(Failures(1e-3, "", together), 6, 5.0, random.Random(1)), 4000)
        moments = list(drawn)
        broken = sum(len(breakage.servers) for breakage in moments)
        assert broken / moments[-1].time == pytest.approx(6e-3, rel=0.05)
    assert list(draw_breakages(Failures(0.0, ""), 6, 5.0, random.Random(1))) == []


def test_a_trace_is_replayed() -> None:
    trace = FailureTrace(2, 100.0, (Outage(0, 10.0, 30.0), Outage(1, 80.0, 85.0)))
    breakages = list(islice(replay_trace(trace, 2, random.Random(5)), 20))
    assert all(before.time <= after.time for before, after in pairwise(breakages))
    # each lap has both outages, 70 apart
    late = [each for each in breakages if each.time >= 100]
    assert {each.away for each in late} == {20.0, 5.0}
    by_server = {each.servers: each.time % 100 for each in late}
    assert len(by_server) == 2
    # more servers than the trace has share histories
    more = list(islice(replay_trace(trace, 5, random.Random(5)), 40))
    assert {server for each in more for server in each.servers} == {0, 1, 2, 3, 4}
    assert list(replay_trace(FailureTrace(1, 100.0, ()), 3, random.Random(1))) == []


def test_a_run_by_a_trace_is_down_as_long_as_the_trace() -> None:
    trace = FailureTrace(
        4, 100 * HOUR, tuple(Outage(s, s * HOUR, (s + 5) * HOUR) for s in range(4))
    )
    run = simulate_run(
        Division(4, 0, 2), Failures(trace.rate, "", trace=trace), make_response(heal=1.0), float,
        period=HOUR, seconds=1000 * HOUR, seed=3,
    )  # fmt: skip
    assert run.time.broken / math.fsum(run.time) == pytest.approx(0.05, rel=0.02)


def test_it_agrees_with_the_closed_form() -> None:
    division, failures = Division(15, 1, 2), Failures(0.5 / DAY, "")
    response = FailureResponse(5.0, 10.0, 20.0, 15.0, 200.0, 2 * HOUR, 0.01)
    estimate = estimate_goodput(division, failures, response, float)
    run = simulate_run(
        division, failures, response, float, period=estimate.period, seconds=1000 * DAY, seed=1
    )
    assert run.samples / run.seconds == pytest.approx(estimate.samples_per_second, rel=0.01)
