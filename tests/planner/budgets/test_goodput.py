"""The closed form of goodput: what it says of known cases, and the published figures."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from benchmarks.goodput import list_gates, make_response
from paceline.planner.budgets.failures import DAY, HOUR, Failures
from paceline.planner.budgets.goodput import (
    MAX_PERIOD,
    Division,
    FailureResponse,
    choose_period,
    compute_daly_cost,
    compute_daly_period,
    compute_loss_rate,
    estimate_goodput,
    list_broken_counts,
)

RESPONSE = FailureResponse(5.0, 10.0, 20.0, 15.0, 200.0, 2 * HOUR, 0.01)


@pytest.mark.slow
def test_all_gates_are_kept() -> None:
    assert [gate for gate in list_gates() if not gate.is_kept] == []


def test_nothing_is_lost_without_failures() -> None:
    goodput = estimate_goodput(Division(8, 0, 1), Failures(0.0, ""), RESPONSE, float)
    assert goodput.period == MAX_PERIOD
    assert goodput.samples_per_second == pytest.approx(8 / (1 + 15 / MAX_PERIOD))
    assert goodput.time.broken == goodput.time.stalled == goodput.time.repeated == 0


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("shrinks", [True, False])
@pytest.mark.parametrize("per_day", [0.01, 1.0, 100.0])
def test_time_is_conserved(copies: int, shrinks: bool, per_day: float) -> None:
    response = FailureResponse(5.0, 10.0, 20.0, 15.0, 200.0, 2 * HOUR, 0.01, shrinks)
    for division in (Division(6, 0, copies), Division(5, 1, copies)):
        time = estimate_goodput(division, Failures(per_day / DAY, ""), response, float).time
        assert math.fsum(time) == pytest.approx(1, abs=1e-12)
        assert min(time) >= 0


def test_a_job_that_restarts_loses_half_a_period() -> None:
    response, failures = make_response(restart=100.0, save=10.0), Failures(1e-5, "")
    goodput = estimate_goodput(Division(4, 0, 1), failures, response, float, period=1000.0)
    assert goodput.time.stalled == pytest.approx(4e-5 * 100)
    assert goodput.time.repeated == pytest.approx(4e-5 * 500)
    assert goodput.time.checkpoint == pytest.approx(goodput.time.useful / 100)


def test_copies_make_checkpoints_rare() -> None:
    failures = Failures(0.1 / DAY, "")
    periods = [
        estimate_goodput(Division(32, 0, copies), failures, RESPONSE, float).period
        for copies in (1, 2, 3)
    ]
    assert periods[0] < HOUR < periods[1] <= periods[2] == MAX_PERIOD


def test_the_loss_of_all_copies() -> None:
    # each of 8 parts has 2 holders; the second fails in the 10 s after the first
    assert compute_loss_rate(1e-6, Division(8, 0, 2), 10.0) == pytest.approx(8 * 2 * 1e-6 * 1e-5)
    assert compute_loss_rate(1e-6, Division(8, 0, 1), 10.0) == pytest.approx(8e-6)
    # with a copy on each server there is only one part
    assert compute_loss_rate(1e-6, Division(2, 0, 2), 10.0) == pytest.approx(2e-6 * 1e-5)


def test_a_standby_serves_a_job_that_has_to_wait() -> None:
    waiting = FailureResponse(5.0, 10.0, 20.0, 15.0, 200.0, 4 * HOUR, 0.0, shrinks=False)
    failures = Failures(0.2 / DAY, "")
    without, with_one = (
        estimate_goodput(division, failures, waiting, float).samples_per_second
        for division in (Division(16, 0, 2), Division(15, 1, 2))
    )
    assert with_one > without
    # fewer go on: then the standby had better train
    going_on = RESPONSE
    assert (
        estimate_goodput(Division(16, 0, 2), failures, going_on, float).samples_per_second
        > estimate_goodput(Division(15, 1, 2), failures, going_on, float).samples_per_second
    )


def test_a_job_that_restarts_waits_for_all_servers() -> None:
    goodput = estimate_goodput(Division(8, 0, 1), Failures(1.0 / DAY, ""), RESPONSE, float)
    up = math.pow(1 / (1 + 2 / 24), 8)
    assert goodput.time.standby == pytest.approx(1 - goodput.time.broken - up, rel=1e-6)


def test_how_many_are_broken_is_binomial() -> None:
    shares = dict(list_broken_counts(10, 1 / DAY, DAY / 4))
    assert math.fsum(shares.values()) == pytest.approx(1)
    assert shares[0] == pytest.approx(0.8**10)
    assert sum(count * share for count, share in shares.items()) == pytest.approx(2)
    assert dict(list_broken_counts(10, 1.0, 0.0)) == {0: 1.0}
    many = dict(list_broken_counts(100_000, 1 / DAY, HOUR))
    assert math.fsum(many.values()) == pytest.approx(1) and len(many) < 3000


def test_daly() -> None:
    mean_time, save = 6 * HOUR, 120.0
    best = compute_daly_period(mean_time, save)
    costs = [compute_daly_cost(mean_time, save, 60.0, best * factor) for factor in (0.9, 1, 1.1)]
    assert costs[1] == min(costs)
    assert compute_daly_period(10.0, 100.0) == 10.0


def test_the_period_follows_the_rate() -> None:
    assert choose_period(0.0, 10.0) == MAX_PERIOD
    assert choose_period(1e-4, 50.0) == pytest.approx(math.sqrt(2 * 1e4 * 50 + 2500))
    periods = [choose_period(rate, 10.0) for rate in (1e-6, 1e-5, 1e-4)]
    assert all(before > after for before, after in pairwise(periods))


@pytest.mark.parametrize(
    ("failures", "doubt"),
    [
        (Failures(1 / DAY, "", together=2), "2 servers fail together"),
        (Failures(100 / DAY, ""), "failures take"),
        (Failures(0.01 / DAY, ""), ""),
    ],
)
def test_it_says_where_it_does_not_hold(failures: Failures, doubt: str) -> None:
    goodput = estimate_goodput(Division(8, 0, 1), failures, make_response(restart=200.0), float)
    assert goodput.doubt.startswith(doubt) and bool(goodput.doubt) == bool(doubt)
