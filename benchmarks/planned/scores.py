"""How well predictions match measurements: errors, order, choices; and a trivial planner."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.planned.rows import MeasuredLayout

GOOD_CHOICE = 1.05  # times the best of the group


class Verdict(NamedTuple):
    """One line of the report.

    Attributes:
        table: The table.
        what: What is compared.
        rows: Number of rows.
        ours: The planner's figure.
        trivial: The trivial planner's figure, in words.
        rival: The best published figure, in words.
        bar: The bar, in words.
        passed: Whether the bar is reached. None: there is no bar.
    """

    table: str
    what: str
    rows: int
    ours: str
    trivial: str = ""
    rival: str = ""
    bar: str = ""
    passed: bool | None = None


def mean_error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Mean of absolute relative errors."""
    return statistics.mean(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True))


def predict_trivially(rows: Sequence[MeasuredLayout]) -> list[float]:
    """Predict each row from the median throughput of all other rows: operations per device."""
    speeds = [row.work / (row.seconds or math.inf) for row in rows]
    return [
        row.work / statistics.median(speeds[:index] + speeds[index + 1 :])
        for index, row in enumerate(rows)
    ]


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Kendall's tau: pairs in the right order less pairs in the wrong one, over all of them."""
    agreed, pairs = 0, 0
    for i in range(len(predicted)):
        for j in range(i):
            product = (predicted[i] - predicted[j]) * (measured[i] - measured[j])
            agreed += (product > 0) - (product < 0)
            pairs += 1
    return agreed / pairs if pairs else 1.0


def group_rows(rows: Sequence[MeasuredLayout]) -> list[list[int]]:
    """Group the indices of rows that are choices for one task, if there are two or more."""
    groups = defaultdict(list)
    for index, row in enumerate(rows):
        groups[row.group].append(index)
    return [indices for indices in groups.values() if len(indices) > 1]


def rate_choices(
    groups: Sequence[Sequence[int]], predicted: Sequence[float], measured: Sequence[float]
) -> float:
    """Share of groups in which the choice takes at most 5 % longer than the best."""
    good = 0
    for indices in groups:
        chosen = min(indices, key=lambda index: predicted[index])
        good += measured[chosen] <= GOOD_CHOICE * min(measured[index] for index in indices)
    return good / len(groups)


def rate_order(
    groups: Sequence[Sequence[int]], predicted: Sequence[float], measured: Sequence[float]
) -> float:
    """Mean of Kendall's tau over groups."""
    return statistics.mean(
        kendall_tau([predicted[i] for i in indices], [measured[i] for i in indices])
        for indices in groups
    )


def chance_of_good_choice(groups: Sequence[Sequence[int]], measured: Sequence[float]) -> float:
    """Share of good choices of one who chooses by chance."""
    shares = []
    for indices in groups:
        best = min(measured[index] for index in indices)
        good = sum(measured[index] <= GOOD_CHOICE * best for index in indices)
        shares.append(good / len(indices))
    return statistics.mean(shares)
