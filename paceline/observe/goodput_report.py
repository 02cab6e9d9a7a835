"""Goodput in words: the share of the workers' time that trained samples that count."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from paceline.formatting import format_duration

PART_MEANINGS = {
    "start": "until training began",
    "data": "for the next batch",
    "waiting": "for slower workers",
    "exchange": "what could not be hidden behind compute",
    "checkpoint": "training stood still to save",
    "recovery": "after losses, and new workers that took their place",
    "repeated": "trained, but lost and trained again",
    "idle": "outside of steps: evaluation, logging, the end",
}


@dataclass(frozen=True)
class GoodputFacts:
    """Seconds and percent of the time of all workers, by part."""

    seconds: dict[str, float]
    percent: dict[str, float]


def read_goodput(fields: Any) -> GoodputFacts | None:
    """Read the `goodput` of a summary. None if the run was written without it.

    Raises:
        ValueError, TypeError, KeyError: It isn't what a run writes.
    """
    if not fields:
        return None
    tables = [
        {name: float(fields[table][name]) for name in ("useful", *PART_MEANINGS)}
        for table in ("seconds", "percent")
    ]
    if not all(0 <= value < math.inf for table in tables for value in table.values()):
        raise ValueError("goodput has a part that is below 0, or isn't a number")
    return GoodputFacts(*tables)


def describe_goodput(goodput: GoodputFacts | None) -> str:
    """Describe where the time of all workers went. Empty if nothing is known.

    Parts that took nothing are left out.
    """
    if goodput is None:
        return ""
    seconds, percent = goodput.seconds, goodput.percent
    whole = format_duration(sum(seconds.values()))
    lines = [
        f"Goodput: {percent['useful']:.1f}% of the workers' time ({whole}, all added up) trained "
        "samples that count. The rest:"
    ]
    lines += [
        f"  {name:<10}{percent[name]:>6.2f}%  {meaning}"
        for name, meaning in PART_MEANINGS.items()
        if percent[name] > 0
    ]
    return "\n".join(lines)
