"""The data of a page are small and plain, however long a run was, and whatever state its folder
is in.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.observe.metrics_reader import MetricsReader
from paceline.observe.page.data import make_page_data, to_strict_values
from paceline.observe.page.decimation import MAX_POINTS
from paceline.record.folder import RunFolder
from tests.harness.finished_runs import finished
from tests.harness.page_runs import whole


def test_a_run_that_has_ended(tmp_path: Path) -> None:
    folder = whole(tmp_path)
    data = make_page_data(folder)
    json.dumps(data, allow_nan=False)
    assert (data["name"], data["ended"], len(data["verdict"])) == ("run", True, 3)
    assert data["summary"] == json.loads((folder / "summary.json").read_text())
    assert data["course"]["step"] == list(range(1, 61)) and data["course"]["count"] == [1] * 60
    assert data["course"]["seconds"]["compute"] == pytest.approx([0.05] * 60)
    assert data["ranks"] == ["rank 0 (shard 0)", "rank 1 (shard 1)"]
    assert [event["kind"] for event in data["events"]] == ["lost", "checkpoint", "came", "fault"]
    assert all(remark["words"] for remark in data["advice"]) and data["quiet"] == ""


def test_a_run_under_way(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    line = {
        "time": 0.5,
        "samples": 8,
        "loss": "nan",
        "seconds": {"compute": 0.1, "exchange": 0.0, "wait": 0.0, "data": 0.0},
    }
    folder.metrics.write_text(
        "".join(json.dumps({"step": step, **line}) + "\n" for step in range(1, 1001))
        + '{"step": 10'
    )
    data = make_page_data(folder)
    json.dumps(data, allow_nan=False)
    assert not data["ended"]
    assert (
        data["summary"]["steps"] == sum(data["course"]["count"]) == 1000
        and data["summary"]["final_loss"] == "nan"
    )
    assert len(data["course"]["step"]) == len(data["values"]["loss"]["mean"]) == MAX_POINTS
    assert set(data["values"]["loss"]["mean"]) == {None}
    assert sum(data["values"]["loss"]["bad"]) == 1000


def test_what_a_run_under_way_tells_of_itself(tmp_path: Path) -> None:
    folder = whole(tmp_path)
    told: dict[str, Any] = json.loads((folder / "summary.json").read_text()) | {
        "steps": 7,
        "live": {"state": "running"},
    }
    (folder / "live.json").write_text(json.dumps(told))
    (folder / "summary.json").unlink()
    data = make_page_data(folder)
    assert (data["ended"], data["summary"]["sync"], len(data["events"])) == (
        False,
        "AllReduce()",
        4,
    )
    # the metrics are never behind
    assert data["summary"]["steps"] == 60 and data["ranks"][1] == "rank 1 (shard 1)"
    assert (
        "So far 2 workers on 2 hosts (mesh data=1, shard=2) have trained 3,840 samples"
        in data["verdict"][0]
    )
    (folder / "live.json").write_text('{"sy')
    assert "sync" not in make_page_data(folder)["summary"]


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    data = make_page_data(tmp_path / "run")
    assert (data["verdict"], data["course"]["step"], data["values"]) == (
        ["No step was finished, so there is nothing to tell about time."],
        [],
        {},
    )


def test_a_reader_goes_on(tmp_path: Path) -> None:
    folder = finished(tmp_path)
    reader = MetricsReader(RunFolder(folder))
    reader.read_new_lines()
    assert make_page_data(folder, reader) == make_page_data(folder)


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no run folder"):
        make_page_data(tmp_path / "nothing")


def test_plain() -> None:
    assert to_strict_values({1: (float("nan"), [float("-inf"), 2.0]), "a": None}) == {
        "1": ["nan", ["-inf", 2.0]],
        "a": None,
    }
