"""What a budget buys: three divisions and the best one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.planner.budgets.budget import (
    BudgetQuestion,
    Money,
    answer_question,
    count_servers,
    find_best,
    list_answers,
    list_divisions,
)
from paceline.planner.budgets.failures import DAY, HOUR, Failures, FailureTrace, Outage
from paceline.planner.budgets.goodput import FailureResponse
from paceline.planner.budgets.sample_rates import SampleRates

RATES = SampleRates({1.0: 100.0, 8.0: 700.0, 16.0: 1200.0}, "plan.toml")
RESPONSE = FailureResponse(2.0, 5.0, 5.0, 5.0, 120.0, 4 * HOUR, 0.01)


def ask(**changes: Any) -> BudgetQuestion:
    question = BudgetQuestion(RATES, Money(2000.0, 1.1), Failures(0.1 / DAY, ""), RESPONSE)
    return replace(question, **changes)


def test_how_many_servers_there_are() -> None:
    assert count_servers(ask()) == 16  # as many as the plan has
    assert count_servers(ask(servers=5)) == 5
    # 2000 / 1.1 / 120 h
    assert count_servers(ask(deadline=5 * DAY)) == 15
    assert count_servers(ask(money=Money(3.0, 1.0))) == 3  # for an hour


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"money": Money(1.0, 1.1)}, "doesn't pay one server for one hour"),
        ({"deadline": 100 * DAY}, "doesn't pay one server up to the deadline"),
        ({"servers": 3000}, "contradicts a budget"),
    ],
)
def test_a_budget_that_buys_nothing(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(UsageError, match=fault) as caught:
        count_servers(ask(**changes))
    assert "\n" not in str(caught.value)


def test_three_answers() -> None:
    names, divisions = zip(*list_answers(ask(), 16), strict=True)
    assert names == ("all train", "balanced", "replication first")
    assert [division.servers for division in divisions] == [16] * 3
    assert [division.copies for division in divisions] == [1, 2, 3]
    standby = [division.standby for division in divisions]
    assert standby[0] == 0 < standby[1] < standby[2] == 5
    # a single server has nobody to copy to
    assert [name for name, _ in list_answers(ask(), 1)] == ["all train"]
    assert all(division.train >= 1 for _, division in list_answers(ask(), 2))


def test_the_best_is_no_worse_than_the_three() -> None:
    for shrinks in (True, False):
        for per_day in (0.001, 0.1, 1.0):
            answer = answer_question(
                ask(
                    failures=Failures(per_day / DAY, ""),
                    response=replace(RESPONSE, shrinks=shrinks),
                )
            )
            assert len(answer.rows) == 3
            most = max(row.samples for row in answer.rows)
            assert answer.best.samples >= most * 0.998


def test_a_standby_is_bought_if_all_would_wait_without_it() -> None:
    going_on = answer_question(ask()).best.division
    waiting = answer_question(ask(response=replace(RESPONSE, shrinks=False))).best.division
    assert going_on.standby == 0 < waiting.standby
    # and nothing is bought if nothing fails
    calm = answer_question(ask(failures=Failures(0.0, ""))).best.division
    assert tuple(calm) == (16, 0, 1)


def test_money_and_days() -> None:
    row = answer_question(ask()).rows[0]
    assert row.money == pytest.approx(2000)
    assert row.seconds == pytest.approx(2000 / 1.1 / 16 * HOUR)
    assert row.samples_per_money == pytest.approx(row.samples / 2000)
    assert row.share == pytest.approx(row.goodput.samples_per_second / 1200)
    assert row.chance is None
    some = answer_question(ask(samples=1e8)).rows[0]
    assert some.seconds == pytest.approx(1e8 / some.goodput.samples_per_second)
    assert some.money == pytest.approx(some.seconds / HOUR * 16 * 1.1)
    assert some.chance == 1


def test_the_probability_to_finish() -> None:
    easy, hard, between = (
        answer_question(ask(samples=samples, deadline=5 * DAY)).best.chance
        for samples in (1e8, 5.2e8, 4.805e8)
    )
    assert (easy, hard) == (1, 0)
    assert between is not None and 0 < between < 1


def test_samples_that_no_division_trains_in_time() -> None:
    question = ask(samples=1e12, servers=16)
    best = find_best(question, 16)
    # it gets furthest with the money
    furthest = find_best(replace(question, samples=None), 16)
    assert best.division == furthest.division and best.samples == furthest.samples


def test_fewer_servers_if_they_are_enough() -> None:
    """Rates grow slowly, so that all servers together cost too much for these samples."""
    rates = SampleRates({1.0: 100.0, 16.0: 200.0}, "plan.toml")
    best = answer_question(ask(rates=rates, samples=2e8)).best
    assert best.division.servers < 16 and best.money <= 2000
    pinned = answer_question(ask(rates=rates, samples=2e8, servers=16)).best
    assert pinned.division.servers == 16 and pinned.money > 2000


def test_servers_that_fail_together_are_simulated() -> None:
    answer = answer_question(ask(failures=Failures(0.1 / DAY, "", together=4)))
    assert all(row.is_simulated for row in (*answer.rows, answer.best))
    assert all(math.fsum(row.goodput.time) == pytest.approx(1) for row in answer.rows)
    assert answer.turnings == ()


def test_a_trace_is_simulated() -> None:
    outages = tuple(Outage(server, server * HOUR, (server + 2) * HOUR) for server in range(8))
    trace = FailureTrace(8, 40 * HOUR, outages)
    failures = Failures(trace.rate, "t.csv", trace=trace)
    answer = answer_question(ask(failures=failures, servers=8))
    assert all(row.is_simulated for row in answer.rows)
    # 2 of 40 hours
    assert answer.rows[0].goodput.time.broken == pytest.approx(0.05, abs=0.01)


def test_what_would_change_the_answer() -> None:
    question = ask(response=replace(RESPONSE, shrinks=False))
    answer = answer_question(question)
    assert answer.turnings
    for turning in answer.turnings:
        assert turning.division != answer.best.division
    more = next(each for each in answer.turnings if each.what == "failures")
    failures = Failures(question.failures.rate * more.factor, "")
    again = find_best(replace(question, failures=failures, servers=16), 16)
    assert again.division == more.division


def test_a_job_that_only_restarts() -> None:
    answer = answer_question(ask(max_copies=1, failures=Failures(0.5 / DAY, "")))
    assert {row.division.copies for row in (*answer.rows, answer.best)} == {1}
    assert answer.best.division.standby > 0
    assert all(turning.division.copies == 1 for turning in answer.turnings)


def test_no_more_copies_than_servers_that_train() -> None:
    divisions = list(list_divisions(ask(), 5))
    assert len(divisions) == len({*divisions})
    assert all(1 <= each.copies <= max(each.train, 1) and each.servers == 5 for each in divisions)
