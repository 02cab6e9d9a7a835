"""What a budget buys: how many servers should train, stand by and hold copies of the state.

Three answers are compared, and the best division that a search finds:

    all train            t t t t t t t t    one copy of the state: a failure restarts all
    balanced             t t t t t t t s    a second copy in memory; standby for what is broken
                                            at a time with a probability of 95 %
    replication first    t t t t t s s s    three copies; a third of the servers stands by

All servers are paid for as long as the training lasts, broken ones too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from paceline.errors import UsageError
from paceline.planner.budgets.failure_simulation import SimulatedRun, simulate_runs
from paceline.planner.budgets.failures import HOUR, Failures
from paceline.planner.budgets.goodput import (
    Division,
    FailureResponse,
    Goodput,
    ServerTime,
    check_conserved,
    estimate_goodput,
    list_broken_counts,
)
from paceline.planner.budgets.sample_rates import SampleRates

COPIES: Final = (1, 2, 3)
_STANDBY_CONFIDENCE: Final = 0.95
# Events of all simulations of one division together, roughly.
_MAX_EVENTS: Final = 100_000
_MIN_SEEDS, _MAX_SEEDS = 8, 200
_SIMULATED_CANDIDATES: Final = 6
# A division with more standby or copies has to be better by this share.
_WORTHWHILE: Final = 0.001


class Money(NamedTuple):
    """What may be spent. `price` is that of a server and hour, in the same money as `budget`."""

    budget: float
    price: float


@dataclass(frozen=True)
class BudgetQuestion:
    """Everything that the answer depends on.

    Attributes:
        rates: Samples per second by number of servers.
        money: Budget, and price of a server and hour.
        failures: How servers fail.
        response: What the job does when a server fails.
        servers: Number of servers. None: as many as the budget pays up to the deadline, or as the
            rates cover.
        deadline: Seconds until training has to end. None: no limit but the budget.
        samples: Samples that training needs. None: as many as the budget pays.
        max_copies: Most copies of the state. 1: the job can only restart from checkpoints.
    """

    rates: SampleRates
    money: Money
    failures: Failures
    response: FailureResponse
    servers: int | None = None
    deadline: float | None = None
    samples: float | None = None
    max_copies: int = COPIES[-1]


@dataclass(frozen=True)
class BudgetRow:
    """What one division of the servers does with the budget.

    Attributes:
        name: Name of the answer.
        goodput: Goodput of the division.
        share: Samples that count, as a share of those of as many servers that all train and never
            fail.
        samples_per_money: Samples that count for each unit of money.
        seconds: Duration of training: of all samples, or of the budget.
        money: Money that this costs.
        samples: Samples that count by then.
        chance: Probability that all samples are trained in time. None without a number of samples.
        is_simulated: Whether the goodput is that of the simulation.
    """

    name: str
    goodput: Goodput
    share: float
    samples_per_money: float
    seconds: float
    money: float
    samples: float
    chance: float | None = None
    is_simulated: bool = False

    @property
    def division(self) -> Division:
        """Division of the servers."""
        return self.goodput.division


class Turning(NamedTuple):
    """A change of an input that changes the answer."""

    what: str
    factor: float
    division: Division


@dataclass(frozen=True)
class BudgetAnswer:
    """The answer to a question.

    Attributes:
        question: The question.
        servers: Number of servers of the three rows.
        rows: The three answers, as far as there are servers for them.
        best: The best division.
        turnings: What would change the best division.
    """

    question: BudgetQuestion
    servers: int
    rows: tuple[BudgetRow, ...]
    best: BudgetRow
    turnings: tuple[Turning, ...]


def answer_question(question: BudgetQuestion) -> BudgetAnswer:
    """Answer a question.

    Raises:
        UsageError: The question contradicts itself, or the budget buys nothing.
    """
    servers = count_servers(question)
    rows = tuple(
        add_chance(judge(question, name, division), question)
        for name, division in list_answers(question, servers)
    )
    best = add_chance(find_best(question, servers), question)
    return BudgetAnswer(question, servers, rows, best, tuple(find_turnings(question, best)))


def count_servers(question: BudgetQuestion) -> int:
    """Count the servers that there are: given, paid up to the deadline, or covered by the rates.

    Raises:
        UsageError: The budget doesn't pay for them.
    """
    budget, price = question.money
    if budget < price:
        raise UsageError(
            f"a budget of {budget:g} doesn't pay one server for one hour, which costs {price:g}"
        )
    affordable = math.floor(budget / price)
    if question.servers is not None:
        if affordable < question.servers:
            raise UsageError(
                f"--servers {question.servers} contradicts a budget of {budget:g}: it pays "
                f"{affordable} servers for one hour"
            )
        return question.servers
    if question.deadline is None:
        return min(question.rates.largest, affordable)
    until_deadline = price * question.deadline / HOUR
    if budget < until_deadline:
        raise UsageError(
            f"a budget of {budget:g} doesn't pay one server up to the deadline, which costs "
            f"{until_deadline:,.2f}"
        )
    return min(affordable, math.floor(budget / until_deadline + 1e-9))


# ---- divisions


def list_answers(question: BudgetQuestion, servers: int) -> list[tuple[str, Division]]:
    """List the three answers. With one server there is only the first."""
    answers = [("all train", Division(servers, 0, 1))]
    if servers > 1:
        standby = min(count_balanced_standby(question, servers), servers - 1)
        third = max(standby, servers // 3)
        for name, spare, copies in (("balanced", standby, 2), ("replication first", third, 3)):
            # Only servers that train hold copies, so there are at most as many.
            copies = min(copies, servers - spare, question.max_copies)
            answers.append((name, Division(servers - spare, spare, copies)))
    return answers


def count_balanced_standby(question: BudgetQuestion, servers: int) -> int:
    """Count the standby that replaces all broken servers at 95 % of the moments; at least 1."""
    reached = 0.0
    rate, response = question.failures.rate, question.response
    for broken, probability in list_broken_counts(servers, rate, response.replace):
        reached += probability
        if reached >= _STANDBY_CONFIDENCE:
            return max(1, broken)
    return max(1, servers - 1)


def list_counts(most: int) -> list[int]:
    """List numbers from 0 to `most`: all small ones, and larger ones in steps of a tenth."""
    counts, count = [], 0
    while count <= most:
        counts.append(count)
        count += max(1, count // 10)
    return [*counts, most] if most >= 0 and counts[-1] != most else counts


def list_divisions(question: BudgetQuestion, servers: int) -> Iterator[Division]:
    """Yield the divisions among which the best is searched, the simplest first."""
    totals = [servers]
    # With a number of samples fewer servers may be enough, unless their number is given.
    if question.servers is None and question.samples is not None:
        totals = [total for total in list_counts(servers) if total > 0]
    for total in totals:
        for standby in list_counts(total - 1):
            for copies in COPIES:
                if copies <= min(max(total - standby, 1), question.max_copies):
                    yield Division(total - standby, standby, copies)


# ---- what a division does


def judge(question: BudgetQuestion, name: str, division: Division) -> BudgetRow:
    """Judge a division: by the closed form, or by simulation where that doesn't hold."""
    goodput = estimate_goodput(
        division, question.failures, question.response, question.rates.find_rate
    )
    row = make_row(question, name, goodput)
    if not goodput.doubt:
        return row
    runs = run_simulations(question, goodput, row.seconds)
    samples_per_second, time = average_runs(runs, division.servers)
    simulated = replace(goodput, samples_per_second=samples_per_second, time=time)
    return replace(make_row(question, name, simulated), is_simulated=True)


def make_row(question: BudgetQuestion, name: str, goodput: Goodput) -> BudgetRow:
    """Make a row of a goodput, without the probability to finish."""
    servers, rate = goodput.division.servers, goodput.samples_per_second
    per_second = servers * question.money.price / HOUR
    limit = find_limit(question, servers)
    seconds = limit
    if question.samples is not None:
        seconds = question.samples / rate if rate > 0 else math.inf
    full_rate = question.rates.find_rate(servers)
    return BudgetRow(
        name,
        goodput,
        rate / full_rate if full_rate else 0.0,
        rate / per_second,
        seconds,
        seconds * per_second,
        rate * min(seconds, limit),
    )


def find_limit(question: BudgetQuestion, servers: int) -> float:
    """Find the seconds for which training may last: what is paid, and up to the deadline."""
    paid = question.money.budget / (servers * question.money.price) * HOUR
    return paid if question.deadline is None else min(paid, question.deadline)


def run_simulations(
    question: BudgetQuestion, goodput: Goodput, seconds: float
) -> list[SimulatedRun]:
    """Simulate runs of some seconds, at most as long as the money and the deadline allow.

    The longer the runs, the fewer they are.
    """
    division, failures = goodput.division, question.failures
    seconds = min(seconds, find_limit(question, division.servers))
    events = 1 + 4 * failures.rate * division.servers * seconds
    seeds = min(max(int(_MAX_EVENTS / events), _MIN_SEEDS), _MAX_SEEDS)
    return simulate_runs(
        division,
        failures,
        question.response,
        question.rates.find_rate,
        period=goodput.period,
        seconds=seconds,
        seeds=range(seeds),
    )


def average_runs(runs: list[SimulatedRun], servers: int) -> tuple[float, ServerTime]:
    """Average simulated runs: samples per second, and the shares of the time of all servers."""
    total = math.fsum(run.seconds for run in runs)
    time = runs[0].time
    for run in runs[1:]:
        time = time.add(run.time)
    shares = time.scale(1 / (total * servers))
    check_conserved(shares, 1.0)
    return math.fsum(run.samples for run in runs) / total, shares


def add_chance(row: BudgetRow, question: BudgetQuestion) -> BudgetRow:
    """Add the probability that all samples are trained in time, by simulation."""
    if question.samples is None:
        return row
    runs = run_simulations(question, row.goodput, math.inf)
    finished = sum(run.most_samples >= question.samples for run in runs)
    return replace(row, chance=finished / len(runs))


# ---- the best


def find_best(question: BudgetQuestion, servers: int) -> BudgetRow:
    """Find the best division.

    With a number of samples it is the one that trains them soonest, among those that the money and
    the deadline allow; if there is none, the one that trains most of them. Without, it is the one
    that trains most samples. A division with more standby or copies has to be better by 0.1 %.
    """
    divisions = list(list_divisions(question, servers))
    rows = [
        make_row(
            question,
            "best",
            estimate_goodput(
                division, question.failures, question.response, question.rates.find_rate
            ),
        )
        for division in divisions
    ]
    rows.sort(key=lambda row: _rank(question, row), reverse=True)
    # Where the closed form doesn't hold, it only says which divisions are worth a simulation.
    first = rows[: 1 if not rows[0].goodput.doubt else _SIMULATED_CANDIDATES]
    best_rank = _rank(question, rows[0])
    first += [row for row in rows[len(first) :] if _is_as_good(_rank(question, row), best_rank)]
    if rows[0].goodput.doubt:
        first = [judge(question, "best", row.division) for row in first[:_SIMULATED_CANDIDATES]]
        best_rank = max(_rank(question, row) for row in first)
    as_good = [row for row in first if _is_as_good(_rank(question, row), best_rank)]
    return min(as_good, key=lambda row: (row.division.standby, row.division.copies))


def _rank(question: BudgetQuestion, row: BudgetRow) -> tuple[bool, float]:
    """Rank a row: whether it trains all samples in time, and how well it does."""
    if question.samples is None:
        return True, row.samples
    in_time = row.seconds <= find_limit(question, row.division.servers)
    return in_time, 1 / row.seconds if in_time else row.samples


def _is_as_good(rank: tuple[bool, float], best: tuple[bool, float]) -> bool:
    """Whether a row is as good as the best one, or worse by less than is worth a standby."""
    return rank[0] == best[0] and rank[1] >= best[1] * (1 - _WORTHWHILE)


# ---- what would change the answer

_FACTORS: Final = (2.0, 5.0, 10.0, 30.0, 100.0)


def find_turnings(question: BudgetQuestion, best: BudgetRow) -> Iterator[Turning]:
    """Yield the smallest changes of single inputs after which another division is best.

    Only the closed form is used, so nothing is found where it doesn't hold.
    """
    if best.goodput.doubt or best.division.servers == 1:
        return
    pinned = replace(question, servers=best.division.servers)
    for what in ("failures", "time to replace a server", "time to restart"):
        for factor in sorted((*_FACTORS, *(1 / each for each in _FACTORS)), key=_distance):
            changed = _change(pinned, what, factor)
            other = _find_best_quickly(changed, best.division.servers)
            if other is not None and other != best.division:
                yield Turning(what, factor, other)
                break


def _distance(factor: float) -> tuple[float, float]:
    return abs(math.log(factor)), -factor


def _change(question: BudgetQuestion, what: str, factor: float) -> BudgetQuestion:
    """Multiply one input by a factor."""
    failures, response = question.failures, question.response
    if what == "failures":
        return replace(question, failures=replace(failures, rate=failures.rate * factor))
    if what == "time to restart":
        return replace(question, response=replace(response, restart=response.restart * factor))
    return replace(question, response=replace(response, replace=response.replace * factor))


def _find_best_quickly(question: BudgetQuestion, servers: int) -> Division | None:
    """Find the best division in closed form. None if it doesn't hold for that one."""
    goodputs = [
        estimate_goodput(division, question.failures, question.response, question.rates.find_rate)
        for division in list_divisions(question, servers)
    ]
    most = max(each.samples_per_second for each in goodputs)
    as_good = [each for each in goodputs if each.samples_per_second >= most * (1 - _WORTHWHILE)]
    best = min(as_good, key=lambda each: (each.division.standby, each.division.copies))
    return None if best.doubt else best.division
