"""Compares a run with the plan that it followed, at its end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.planner.ledger import append_entry, compare_run
from paceline.planner.plan_file import read_plan


def conclude_plan(
    plan: str | None, metrics: Path, announce: Callable[[str], None]
) -> dict[str, Any] | None:
    """Compare the steps of a run with its plan, and write the ledger. First worker only.

    A plan or a ledger that can't be read or written any more is announced, and ends nothing.

    Args:
        plan: File of the plan. None: the run follows none.
        metrics: File of the run's metrics.
        announce: Shows a message to the user.

    Returns:
        The comparison as plain data, for the summary. None if there is nothing to compare.
    """
    if plan is None:
        return None
    try:
        entry = compare_run(read_plan(Path(plan)), _read_step_seconds(metrics))
        if entry is None:
            return None
        announce(entry.describe())
        append_entry(Path(plan), entry)
    except (OSError, UsageError, ValueError, KeyError) as error:
        announce(f"the run could not be compared with its plan: {error}")
        return None
    return {**asdict(entry), "words": entry.describe()}


def _read_step_seconds(metrics: Path) -> list[float]:
    """Read the seconds of each step, the mean over workers."""
    with metrics.open(encoding="utf-8") as file:
        lines = map(json.loads, file)
        return [sum(line["seconds"].values()) for line in lines if "seconds" in line]
