"""The options of `paceline plan --budget`, and the answer that they ask for.

arguments = parse_budget_arguments(["--budget", "2000", "--price", "1.10", "--failures",
                                    "6.5/1000-node-days", "plan.toml"])
print(answer_budget(arguments))
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, NoReturn

from paceline.errors import UsageError
from paceline.planner.budgets.budget import (
    COPIES,
    BudgetQuestion,
    Money,
    answer_question,
    count_servers,
)
from paceline.planner.budgets.budget_text import (
    Assumption,
    PlannedScript,
    format_answer,
    format_time,
    make_fields,
)
from paceline.planner.budgets.failures import DAY, HOUR, Failures, parse_failures
from paceline.planner.budgets.goodput import FailureResponse
from paceline.planner.budgets.sample_rates import SampleRates, read_sample_rates

DEFAULT_FAILURES: Final = "rsc-1"
# Seconds without an option or a measurement, and where they come from.
DEFAULT_TIMES: Final[dict[str, tuple[float, str]]] = {
    "notice": (2.5, "paceline: a host that is silent for as long counts as lost"),
    "heal": (0.25, "measured on the results page: 0.23 s"),
    "join": (1.5, "measured on the results page: seconds until all take part"),
    "save": (1.0, "assumed; see stall_seconds of a run's summary.json"),
    "restart": (120.0, "assumed"),
    "replace": (HOUR, "assumed"),
}
_MEANINGS: Final = {
    "notice": "until a failure is noticed",
    "heal": "until the others train again, once they have noticed",
    "join": "all pause to let a server in",
    "save": "a checkpoint stops training",
    "restart": "to restart from a checkpoint, once noticed",
    "replace": "until a broken server is replaced",
}
DEFAULT_COPY_COST: Final = 0.002
_UNITS: Final = {"": 1.0, "s": 1.0, "min": 60.0, "h": HOUR, "d": DAY}
_MAX_SUMMARY_NBYTES: Final = 64 << 20


@dataclass(frozen=True)
class BudgetArguments:
    """The options as they were typed. None: not given."""

    plan: str
    budget: float
    price: float
    failures: str = DEFAULT_FAILURES
    together: int | None = None
    servers: int | None = None
    workers_per_server: int | None = None
    deadline: str | None = None
    samples: float | None = None
    max_copies: int = 3
    fixed: bool = False
    measured: str | None = None
    notice: str | None = None
    heal: str | None = None
    join: str | None = None
    save: str | None = None
    restart: str | None = None
    replace: str | None = None
    copy_cost: float | None = None
    json: bool = False


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as all errors of the command."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"paceline plan --budget: {message}")


def add_budget_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a budget to a parser."""
    parser.add_argument("plan", metavar="PLAN", help="a plan (.toml) with [samples_per_second]")
    parser.add_argument("--budget", type=float, required=True, help="money that may be spent")
    parser.add_argument("--price", type=float, required=True, help="of a server and hour")
    parser.add_argument(
        "--failures",
        default=DEFAULT_FAILURES,
        help="6.5/1000-node-days, 0.02/day, 0.05/hour, rsc-1, rsc-2, llama-3, or a trace (.csv)",
    )
    parser.add_argument("--together", type=int, help="servers that fail at the same moment")
    parser.add_argument("--servers", type=int, help="number of servers in all")
    parser.add_argument("--workers-per-server", type=int, help="default: as the plan says, else 1")
    parser.add_argument("--deadline", help="time until training has to end: 36h, 5d")
    parser.add_argument("--samples", type=float, help="samples that training needs")
    parser.add_argument(
        "--max-copies",
        type=int,
        default=3,
        help="most copies of the state; 1: the job only restarts, as on GPUs and with cut models",
    )
    parser.add_argument(
        "--fixed", action="store_true", help="the job can't go on with fewer servers"
    )
    parser.add_argument("--measured", metavar="RUN", help="take times from this run's summary.json")
    for name, meaning in _MEANINGS.items():
        parser.add_argument(f"--{name}", metavar="TIME", help=f"{meaning}: 5s, 2min, 4h")
    parser.add_argument(
        "--copy-cost", type=float, help="part of the training time for each further copy"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def parse_budget_arguments(texts: Sequence[str]) -> BudgetArguments:
    """Parse the options. Raises `UsageError` for anything that isn't one."""
    parser = _Parser(prog="paceline plan --budget", add_help=False, allow_abbrev=False)
    add_budget_options(parser)
    values = vars(parser.parse_args(list(texts)))
    return BudgetArguments(**{each.name: values[each.name] for each in fields(BudgetArguments)})


def describe_budget_options() -> str:
    """Describe all options, for `--help`."""
    parser = _Parser(prog="paceline plan", add_help=False, allow_abbrev=False)
    add_budget_options(parser)
    return parser.format_help()


def answer_budget(arguments: BudgetArguments) -> str:
    """Answer what a budget buys: as text, or as JSON.

    Raises:
        UsageError: An option can't be read, two contradict each other, or the budget buys nothing.
    """
    _check_numbers(arguments)
    rates = read_sample_rates(Path(arguments.plan), arguments.workers_per_server)
    failures = parse_failures(
        arguments.failures, 1 if arguments.together is None else arguments.together
    )
    if arguments.together is not None and arguments.failures.lower().endswith(".csv"):
        raise UsageError("--together contradicts a trace, which says itself what fails together")
    response, assumed_times = choose_response(arguments, failures)
    question = BudgetQuestion(
        rates,
        Money(arguments.budget, arguments.price),
        failures,
        response,
        arguments.servers,
        None if arguments.deadline is None else parse_time(arguments.deadline, "--deadline"),
        arguments.samples,
        arguments.max_copies,
    )
    servers = count_servers(question)
    assumptions = [*_list_assumptions(arguments, rates, failures, servers), *assumed_times]
    target = _find_target(arguments)
    answer = answer_question(question)
    if arguments.json:
        return json.dumps(make_fields(answer, assumptions, target), indent=2)
    return format_answer(answer, assumptions, target)


def parse_time(text: str, option: str) -> float:
    """Parse a time such as 90, 90s, 5min, 4h or 2d, in seconds."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([a-z]*)", text.strip())
    if match is None or match[2] not in _UNITS:
        raise UsageError(f"{option} {text!r} isn't a time: write 90s, 5min, 4h or 2d")
    return float(match[1]) * _UNITS[match[2]]


def _check_numbers(arguments: BudgetArguments) -> None:
    """Raise `UsageError` if a number has no meaning."""
    for option, value in (
        ("--budget", arguments.budget),
        ("--price", arguments.price),
        ("--samples", arguments.samples),
        ("--servers", arguments.servers),
    ):
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{option} {value:g}: it has to be above 0")
    if arguments.max_copies not in COPIES:
        raise UsageError(f"--max-copies {arguments.max_copies}: it has to be 1, 2 or 3")
    if arguments.max_copies == 1 and arguments.copy_cost is not None:
        raise UsageError("--copy-cost contradicts --max-copies 1: there are no further copies")
    if arguments.copy_cost is not None and not 0 <= arguments.copy_cost < 0.5:
        raise UsageError(
            f"--copy-cost {arguments.copy_cost:g}: it is a part of the training time, "
            "such as 0.01, and below 0.5"
        )
    if arguments.deadline is not None and parse_time(arguments.deadline, "--deadline") <= 0:
        raise UsageError(f"--deadline {arguments.deadline}: it has to be above 0")


# ---- times


def choose_response(
    arguments: BudgetArguments, failures: Failures
) -> tuple[FailureResponse, list[Assumption]]:
    """Choose the times: those given, else those measured, else the defaults.

    Returns:
        The times, and each with its origin.
    """
    measured = {} if arguments.measured is None else read_measured_times(Path(arguments.measured))
    times, assumptions = {}, []
    for name, (default, default_origin) in DEFAULT_TIMES.items():
        given = getattr(arguments, name)
        value, origin = default, default_origin
        if name in measured:
            value, origin = measured[name], f"measured, {arguments.measured}"
        if name == "replace" and failures.trace is not None:
            if given is not None:
                raise UsageError(
                    "--replace contradicts a trace, which says itself when a server comes back"
                )
            value, origin = failures.trace.down_seconds, "mean of the trace"
        elif given is not None:
            value, origin = parse_time(given, f"--{name}"), "given"
        times[name] = value
        assumptions.append(Assumption(_MEANINGS[name], format_time(value), origin))
    cost, origin = DEFAULT_COPY_COST, "measured on the results page: --min-workers"
    if arguments.copy_cost is not None:
        cost, origin = arguments.copy_cost, "given"
    waits = arguments.fixed or arguments.max_copies == 1
    if arguments.max_copies > 1:
        assumptions.append(Assumption("each further copy slows training by", f"{cost:.1%}", origin))
    going_on = "all wait for a replacement" if waits else "the others go on, with copies"
    assumptions.append(
        Assumption("if no server stands by", going_on, "given" if waits else "default")
    )
    return FailureResponse(**times, copy_share=cost, shrinks=not arguments.fixed), assumptions


def read_measured_times(path: Path) -> dict[str, float]:
    """Read the times that a run has measured, from its folder or its `summary.json`.

    They are "save", "heal" and "restart", as far as the run has saved, healed and restarted.

    Raises:
        UsageError: There is no summary, or it has none of these times.
    """
    file = path / "summary.json" if path.is_dir() else path
    try:
        if file.stat().st_size > _MAX_SUMMARY_NBYTES:
            raise UsageError(f"--measured: {file} has more than 64 MB")
        summary: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--measured: {file} can't be read: {error}") from error
    times: dict[str, float] = {}
    if isinstance(summary, dict):
        saves, lost = summary.get("checkpoints"), summary.get("goodput")
        for name, table, seconds, count in (
            ("save", saves, "stall_seconds", "count"),
            ("heal", lost, "heal_seconds", "heals"),
            ("restart", lost, "restart_seconds", "restarts"),
        ):
            if not isinstance(table, dict):
                continue
            total, events = table.get(seconds), table.get(count)
            if isinstance(total, int | float) and isinstance(events, int) and total > 0 < events:
                times[name] = total / events
    if not times:
        raise UsageError(f"--measured: {file} has no times of checkpoints, losses or restarts")
    return times


# ---- what is shown


def _list_assumptions(
    arguments: BudgetArguments, rates: SampleRates, failures: Failures, servers: int
) -> list[Assumption]:
    """List the inputs other than times, with their origin."""
    origin = "given"
    if arguments.servers is None:
        origin = "the most of the plan" if arguments.deadline is None else "paid up to the deadline"
    per_thousand = failures.rate * DAY * 1000
    rate = f"{per_thousand:.3g} per 1,000 server-days"
    if failures.together > 1:
        rate += f", {failures.together} together"
    shown = [
        Assumption("budget", f"{arguments.budget:,.10g}", "given"),
        Assumption("price of a server and hour", f"{arguments.price:,.10g}", "given"),
        Assumption("servers", f"{servers:,}", origin),
        Assumption(
            "samples/s of them", f"{rates.find_rate(servers):,.4g}", rates.describe(servers)
        ),
        Assumption("failures", rate, failures.origin),
    ]
    if arguments.deadline is not None:
        deadline = format_time(parse_time(arguments.deadline, "--deadline"))
        shown.append(Assumption("deadline", deadline, "given"))
    if arguments.samples is not None:
        samples = f"{arguments.samples:,.10g}"
        shown.append(Assumption("samples that training needs", samples, "given"))
    return shown


def _find_target(arguments: BudgetArguments) -> PlannedScript:
    """Find the script and the workers of a server, which a plan of `paceline plan` has."""
    content = tomllib.loads(Path(arguments.plan).read_text(encoding="utf-8"))
    script, workers = content.get("script"), content.get("workers", [1])
    count = arguments.workers_per_server
    return PlannedScript(
        script if isinstance(script, str) and script else "SCRIPT",
        int(workers[0]) if count is None else count,
    )
