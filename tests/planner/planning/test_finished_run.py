"""What a finished run says to a plan: its steps, its memory, and how far off its prediction is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.planner.answer import Wishes
from paceline.planner.planning.finished_run import (
    find_correction,
    make_run_profile,
    plan_run,
    read_finished_run,
)
from paceline.planner.planning.planned_input import split_changes
from tests.harness.finished_runs import finished

PARTS = {"compute": 0.1, "exchange": 0.02, "wait": 0.0, "data": 0.001}
HELD = {"parameters": 4_000_000, "gradients": 4_000_000, "optimizer": 8_000_000}


def make_run(tmp_path: Path, *hosts: str, **changes: Any) -> Path:
    """A run with a worker on each of these hosts."""
    hosts = hosts or ("a", "a")
    fields: dict[str, Any] = {
        "hosts": len(set(hosts)),
        "workers": len(hosts),
        "settings": {"script": "train.py", "threads": 1, "device": "cpu"},
        "memory": [{"predicted": HELD, "measured": HELD, "peak": 300_000_000}] * len(hosts),
    }
    folder = finished(tmp_path, PARTS, **(fields | changes))
    summary = json.loads((folder / "summary.json").read_text())
    members = [{"worker": i, "rank": i, "host": host} for i, host in enumerate(hosts)]
    (folder / "summary.json").write_text(json.dumps({**summary, "members": members}))
    return folder


def test_a_profile_has_the_steps_of_the_run(tmp_path: Path) -> None:
    run = read_finished_run(make_run(tmp_path))
    assert (run.batch, run.workers, run.sync) == (64, {"a": 2}, "")
    profile = make_run_profile(run, 1e10)
    own = profile.conditions[0].predict_step(32)
    # Parameters and states there and back, and gradients.
    assert own.optimizer == pytest.approx((2 * 12_000_000 + 4_000_000) / 1e10)
    assert own.seconds == pytest.approx(0.101)
    assert profile.conditions[0].predict_step(64).forward == pytest.approx(2 * own.forward)
    assert sum(each.numel for each in profile.gradients) == pytest.approx(1_000_000, abs=10)


def test_more_workers_and_another_link(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "a", "b")
    slow, shown = plan_run(folder, None, ["link=10mbit"], Wishes())
    assert shown.startswith(f"{folder}: 2 workers, AllReduce(), 121 ms a step, 528.9 samples/s.")
    assert slow.together.candidate.cluster.workers == 2
    fast, _ = plan_run(folder, None, ["link=30gbit"], Wishes())
    assert slow.together.step.seconds > 5 * fast.together.step.seconds
    four, _ = plan_run(folder, None, ["link=30gbit", "hosts=4"], Wishes())
    assert four.together.candidate.cluster.workers == 4
    assert four.together.step.seconds < 0.7 * fast.together.step.seconds


def test_its_own_way_is_predicted_as_it_was(tmp_path: Path) -> None:
    plan, shown = plan_run(make_run(tmp_path), None, [], Wishes())
    assert "predicted: " in shown
    assert plan.together.step.seconds == pytest.approx(0.121)


def test_another_strategy(tmp_path: Path) -> None:
    changes, sync = split_changes(["workers=4", "sync=LocalSGD(every=8)"], None)
    assert (changes, sync) == (["workers=4"], "LocalSGD(8)")
    plan, _ = plan_run(make_run(tmp_path), None, changes, Wishes(sync=sync))
    assert plan.together.candidate.sync == sync
    assert plan.together.candidate.cluster.workers == 4
    with pytest.raises(UsageError, match="one strategy"):
        split_changes(["sync=Gossip()"], "LocalSGD(every=8)")


def test_the_correction_is_bounded(tmp_path: Path) -> None:
    run = read_finished_run(make_run(tmp_path))
    assert find_correction(run, None) == 1.0
    assert find_correction(run, 0.11) == pytest.approx(1.1)
    assert find_correction(run, 0.0001) == 3.0
    alone = read_finished_run(make_run(tmp_path / "alone", "a"))
    assert find_correction(alone, 0.11) == 1.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mesh": {"data": 1, "shard": 2}}, "cut model"),
        ({"settings": {"script": "t.py", "threads": 1, "device": "cuda"}}, "trained on cuda"),
        ({"settings": {}}, "another version"),
        ({"memory": []}, "another version"),
    ],
)
def test_runs_that_cant_be_planned(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_finished_run(make_run(tmp_path, **changes))


def test_folders_without_a_finished_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no summary of a run that has ended"):
        read_finished_run(tmp_path)
    with pytest.raises(UsageError, match="how fast their links are"):
        plan_run(make_run(tmp_path, "a", "b"), None, ["hosts=3"], Wishes())
