"""Predicted beside measured seconds of a step, for each run of a plan: a line of JSON each.

The file lies beside the plan, as `plan-ledger.jsonl`. The next plan for the same cluster multiplies
its predictions by what the runs have shown.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from paceline.planner.plan_file import PlanFile

NAME: Final = "plan-ledger.jsonl"
RECENT: Final = 8  # runs that a correction is learnt from
MOST_CORRECTION: Final = 3.0  # a run that is off by more says nothing about the next one


@dataclass(frozen=True)
class LedgerEntry:
    """One run of a plan.

    Attributes:
        script: The script.
        cluster: As in the plan.
        workers: Number of workers.
        sync: Strategy of the plan.
        predicted: Seconds of a step.
        measured: Median seconds of a step.
        steps: Steps that were measured.
    """

    script: str
    cluster: str
    workers: int
    sync: str
    predicted: float
    measured: float
    steps: int

    @property
    def ratio(self) -> float:
        """How many times as long a step took as was predicted."""
        return self.measured / self.predicted

    def describe(self) -> str:
        """Describe the comparison in one line."""
        off = abs(self.ratio - 1.0)
        words = "as planned" if off < 0.005 else f"{off:.0%} {'more' if self.ratio > 1 else 'less'}"
        return (
            f"planned {self.predicted * 1e3:.4g} ms a step, it took {self.measured * 1e3:.4g} ms "
            f"(median of {self.steps}): {words}"
        )


def compare_run(plan: PlanFile, step_seconds: Sequence[float]) -> LedgerEntry | None:
    """Compare a run with its plan. The first steps, which allocate memory, don't count.

    None if the run has too few steps to say anything.
    """
    counted = step_seconds[min(3, len(step_seconds) // 4) :]
    if not counted:
        return None
    return LedgerEntry(
        plan.script,
        plan.cluster,
        sum(plan.workers),
        plan.sync,
        plan.seconds_per_step,
        statistics.median(counted),
        len(counted),
    )


def append_entry(plan_path: Path, entry: LedgerEntry) -> None:
    """Append a run to the ledger beside the plan."""
    with (plan_path.parent / NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(entry)) + "\n")


def read_entries(path: Path) -> list[LedgerEntry]:
    """Read a ledger. Lines that are damaged, by a crash for example, are left out."""
    entries = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            entry = LedgerEntry(**json.loads(line))
            if entry.predicted > 0 and entry.measured > 0:
                entries.append(entry)
        except (TypeError, ValueError):
            continue
    return entries


def learn_correction(entries: Iterable[LedgerEntry], cluster: str, script: str) -> float:
    """Learn by how much predictions of runs with several workers are off on a cluster.

    Runs of the same script count, if there are any, else those of all scripts.

    Returns:
        The geometric mean of measured / predicted and of one run as predicted.
    """
    fitting = [
        entry
        for entry in entries
        if entry.cluster == cluster
        and entry.workers > 1
        and 1 / MOST_CORRECTION < entry.ratio < MOST_CORRECTION
    ]
    own = [entry for entry in fitting if entry.script == script]
    recent = (own or fitting)[-RECENT:]
    if not recent:
        return 1.0
    # The prediction itself counts as one run, so that a single disturbed run says little.
    return math.exp(sum(math.log(entry.ratio) for entry in recent) / (len(recent) + 1))
