"""Goodput of whole jobs: undisturbed, with a worker that is killed, and with a restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.observe.report import format_report
from paceline.planner.budgets.budget_options import read_measured_times
from tests.harness.jobs import jobs

pytestmark = pytest.mark.jobs

# The last worker is killed at step 12, once.
SCRIPT = """
with pl.start(name="x", device="cpu") as run:
    last = run.rank == run.size - 1
    model, optimizer, loader = parts(run, samples=160)
    for _ in run.epochs(1):
        for x, y in loader:
            time.sleep(0.05)
            step(run, model, optimizer, x, y)
            if run.steps == 4:
                run.save()
            if last and run.steps == 12 and DIES and not os.path.exists("killed"):
                open("killed", "w").close()
                os.kill(os.getpid(), 9)
"""


def train(folder: Path, workers: int, *options: str, dies: bool) -> dict[str, Any]:
    """Run a job, check what holds for all, and return its summary."""
    with jobs(folder) as started:
        ended = started.run(SCRIPT.replace("DIES", str(dies)), workers, *options).end()
    assert ended.code == 0, ended.err
    summary = json.loads((folder / "runs" / "x" / "summary.json").read_text())
    goodput = summary["goodput"]
    assert sum(round(100 * value) for value in goodput["percent"].values()) == 10_000
    microseconds = sum(round(1e6 * value) for value in goodput["seconds"].values())
    assert microseconds == round(1e6 * goodput["worker_seconds"])
    assert "Goodput: " in format_report(folder / "runs" / "x")
    return summary  # type: ignore[no-any-return]


def test_undisturbed(tmp_path: Path) -> None:
    summary = train(tmp_path, 2, dies=False)
    seconds = summary["goodput"]["seconds"]
    # 20 steps of at least 50 ms on each of two workers
    assert seconds["useful"] >= 2
    assert seconds["recovery"] == seconds["repeated"] == 0
    assert min(seconds["start"], seconds["checkpoint"]) > 0
    # the checkpoint was made in the body of the loop, and is not counted as computing, too
    computed = sum(rank["compute"] for rank in summary["rank_seconds"]) * summary["steps"]
    assert seconds["useful"] < computed


def test_a_worker_that_is_killed(tmp_path: Path) -> None:
    summary = train(tmp_path, 3, "--min-workers", "2", dies=True)
    goodput, seconds = summary["goodput"], summary["goodput"]["seconds"]
    assert summary["workers"] == 2 and goodput["heals"] == 1
    assert min(seconds["recovery"], seconds["repeated"], goodput["heal_seconds"]) > 0
    assert goodput["restarts"] == 0
    # what a budget is planned with
    assert {"save", "heal"} == {*read_measured_times(tmp_path / "runs" / "x")}
    # 2 workers took 20 steps, and the lost one at least some
    assert seconds["useful"] > 2 * 20 * 0.05
    assert goodput["worker_seconds"] > 2 * summary["seconds"]


def test_a_restart_from_a_checkpoint(tmp_path: Path) -> None:
    summary = train(tmp_path, 2, "--restarts", "1", dies=True)
    goodput, seconds = summary["goodput"], summary["goodput"]["seconds"]
    assert goodput["restarts"] == 1 and goodput["restart_seconds"] > 0
    assert "restart" in read_measured_times(tmp_path / "runs" / "x")
    # steps 6 to 12 at least, on two workers
    assert seconds["repeated"] >= 2 * 7 * 0.05
    assert seconds["recovery"] > 0
    # steps 1 to 5 of the first start, and the rest of the second
    assert seconds["useful"] >= 2 * 19 * 0.05
