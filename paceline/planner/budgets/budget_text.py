"""The answer to the question of a budget, in words, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from paceline.formatting import format_count
from paceline.planner.budgets.budget import BudgetAnswer, BudgetRow, Turning
from paceline.planner.budgets.failures import DAY, HOUR
from paceline.planner.budgets.goodput import MAX_PERIOD

MAX_RESTARTS: Final = 200  # that `paceline run` takes
PATIENCE: Final = 600.0  # seconds, the default of `paceline run`
_COLUMNS: Final = (
    "",
    "train",
    "standby",
    "copies",
    "checkpoint",
    "goodput",
    "samples/s",
    "samples per money",
    "days",
    "money",
    "in time",
)


class Assumption(NamedTuple):
    """An input of the answer: its name, its value in words, and where it comes from."""

    name: str
    value: str
    origin: str


@dataclass(frozen=True)
class PlannedScript:
    """What the `paceline run` line is for: the script, and the workers on each server."""

    script: str
    workers_per_server: int


def format_answer(
    answer: BudgetAnswer, assumptions: Sequence[Assumption], target: PlannedScript
) -> str:
    """Format the answer as text: inputs, rows, one sentence, what would change it, and a command.

    Args:
        answer: The answer.
        assumptions: The inputs, in the order in which they are shown.
        target: Script and workers for the `paceline run` line.
    """
    inputs = _align([("input", "", "from"), *assumptions], right=())
    rows = [_make_cells(row) for row in (*answer.rows, answer.best)]
    table = _align([_COLUMNS, *rows], right=range(1, len(_COLUMNS)))
    # Nobody can judge a probability without a number of samples.
    if answer.question.samples is None:
        table = [line.removesuffix("in time").removesuffix("-").rstrip() for line in table]
    notes = [explain_best(answer), *(explain_turning(each) for each in answer.turnings)]
    notes += describe_doubts(answer)
    command = ["Run it:", *(f"  {line}" for line in describe_run(answer, target))]
    return "\n".join([*inputs, "", *table, "", *notes, "", *command])


def _make_cells(row: BudgetRow) -> tuple[str, ...]:
    """Make the cells of a row."""
    division = row.division
    return (
        row.name,
        f"{division.train:,}",
        f"{division.standby:,}",
        f"{division.copies}",
        format_time(row.goodput.period),
        f"{row.share:.1%}",
        _format_number(row.goodput.samples_per_second),
        _format_number(row.samples_per_money),
        _format_number(row.seconds / DAY) if math.isfinite(row.seconds) else "never",
        f"{row.money:,.0f}" if math.isfinite(row.money) else "-",
        "-" if row.chance is None else f"{row.chance:.0%}",
    )


def _align(rows: Sequence[Sequence[str]], *, right: Sequence[int]) -> list[str]:
    """Align the columns of a table; those in `right` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def format_time(seconds: float) -> str:
    """Format seconds with the largest unit that fits: 45 s, 12 min, 3.5 h, 2 days."""
    for unit, size in (("days", DAY), ("h", HOUR), ("min", 60.0)):
        if seconds >= 2 * size or (unit == "h" and seconds >= size):
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _format_number(number: float) -> str:
    """Format a number with three digits, or as a whole number with commas."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


# ---- words


def explain_best(answer: BudgetAnswer) -> str:
    """Say in one sentence which division is best, and why."""
    best, question = answer.best, answer.question
    division, loss = best.division, best.goodput.time
    parts = [f"{format_count(division.train, 'server')} should train"]
    if division.standby:
        parts.append(f"{division.standby:,} stand{'s' * (division.standby == 1)} by")
    mean_time = question.failures.mean_time(division.servers)
    often = (
        "no server fails" if math.isinf(mean_time) else f"one fails every {format_time(mean_time)}"
    )
    if division.copies > 1:
        parts.append(f"{division.copies} of them hold each part of the state")
        why = "the others go on after a failure, and copies cost less than restarts"
    elif question.max_copies > 1:
        why = "restarts cost less than copies of the state"
    else:
        why = "all restart after a failure"
    if division.standby:
        why += ", and a server that stands by costs less than waiting without it"
    elif division.servers > 1:
        why += ", and a server that stands by would train nothing meanwhile"
    lost = loss.stalled + loss.repeated + loss.checkpoint + loss.copying
    text = (
        f"{_join(parts)}: {often}, {why}; stalls, repeated work, checkpoints and copies take "
        f"{lost:.1%} of the time, broken servers {loss.broken:.1%}."
    )
    if question.samples is not None and best.samples < question.samples * (1 - 1e-9):
        text += (
            f" No division trains all samples in time: this one gets through "
            f"{best.samples / question.samples:.0%} of them."
        )
    return text


def _join(parts: Sequence[str]) -> str:
    """Join parts of a sentence: a, b and c."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def explain_turning(turning: Turning) -> str:
    """Say which change of an input makes another division the best."""
    division, factor = turning.division, turning.factor
    times = f"{factor:g} times" if factor >= 1 else f"1/{1 / factor:.0f} of"
    what = {"failures": "as many failures" if factor >= 1 else "the failures"}
    copies = "1 copy" if division.copies == 1 else f"{division.copies} copies"
    return (
        f"With {times} {what.get(turning.what, f'the {turning.what}')}: {division.train:,} train, "
        f"{division.standby:,} stand by, {copies}."
    )


def describe_doubts(answer: BudgetAnswer) -> list[str]:
    """Describe where the closed form didn't hold, and what was done instead."""
    doubts: dict[str, list[str]] = {}
    for row in (*answer.rows, answer.best):
        if row.is_simulated:
            doubts.setdefault(row.goodput.doubt, []).append(row.name)
    return [
        f"Simulated, as the closed form doesn't hold ({doubt}): {', '.join(dict.fromkeys(names))}."
        for doubt, names in doubts.items()
    ]


def describe_run(answer: BudgetAnswer, target: PlannedScript) -> list[str]:
    """Describe the commands that do what the best row says."""
    best, failures = answer.best, answer.question.failures
    division = best.division
    seconds = best.seconds if math.isfinite(best.seconds) else 0.0
    # With copies, restarts are counted on each host.
    servers = 1 if division.copies > 1 else division.train
    expected = failures.rate * servers * seconds
    restarts = min(MAX_RESTARTS, max(3, math.ceil(expected + 3 * math.sqrt(expected))))
    options = [f"--workers {target.workers_per_server}"]
    if division.servers > 1:
        options.append(f"--hosts {division.train} --join FIRST:29400 --secret-file job.secret")
    if division.copies > 1:
        least = division.train if not answer.question.response.shrinks else division.train // 2 + 1
        options.append(f"--min-workers {least * target.workers_per_server}")
    options.append(f"--restarts {restarts}")
    # The others wait for a replacement, by default for ten minutes.
    if answer.question.response.replace > PATIENCE / 2 and division.servers > 1:
        options.append(f"--patience {math.ceil(2 * answer.question.response.replace)}")
    lines = [f"paceline run {' '.join(options)} {target.script}"]
    if division.train > 1:
        lines[0] += "   # on each server that trains"
    if division.standby:
        lines.append("the same on a server that stands by, when one of the others is lost")
    how_often = "at least every" if best.goodput.period >= MAX_PERIOD else "every"
    period = format_time(best.goodput.period)
    lines.append(f"run.save(background=True) in the script {how_often} {period}")
    return lines


# ---- JSON


def make_fields(
    answer: BudgetAnswer, assumptions: Sequence[Assumption], target: PlannedScript
) -> dict[str, Any]:
    """Make the fields of the JSON. Arguments are those of `format_answer`."""
    return {
        "inputs": [each._asdict() for each in assumptions],
        "servers": answer.servers,
        "rows": [_make_row_fields(row) for row in answer.rows],
        "best": _make_row_fields(answer.best),
        "why": explain_best(answer),
        "changes": [
            {"what": each.what, "factor": each.factor, **each.division._asdict()}
            for each in answer.turnings
        ],
        "run": describe_run(answer, target),
    }


def _make_row_fields(row: BudgetRow) -> dict[str, Any]:
    """Make the fields of a row. What never ends has no days and no money."""
    is_finite = math.isfinite(row.seconds)
    return {
        "name": row.name,
        **row.division._asdict(),
        "period_seconds": row.goodput.period,
        "goodput": row.share,
        "samples_per_second": row.goodput.samples_per_second,
        "samples_per_money": row.samples_per_money,
        "days": row.seconds / DAY if is_finite else None,
        "money": row.money if is_finite else None,
        "samples": row.samples,
        "chance_in_time": row.chance,
        "simulated": row.is_simulated,
        "doubt": row.goodput.doubt,
        "time": row.goodput.time._asdict(),
    }
