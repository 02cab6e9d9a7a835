"""The data of a page are small and plain, however long a run was, and whatever state its folder is in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.observe.metrics import MetricsReader
from paceline.observe.page.data import page_data
from paceline.observe.page.decimation import POINTS
from paceline.session.record.folder import RunFolder
from tests.harness.finished_runs import finished


def test_a_run_that_has_ended(tmp_path: Path) -> None:
    data = page_data(finished(tmp_path))
    json.dumps(data, allow_nan=False)
    assert (data["name"], data["ended"], data["steps"], data["workers"], data["sync"]) == ("run", True, 100, 2, "AllReduce()")
    assert data["course"]["step"] == list(range(1, 101))
    assert data["course"]["count"] == [1] * 100
    assert data["course"]["seconds"]["compute"] == pytest.approx([0.095] * 100)


def test_a_run_under_way(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    line = {"time": 0.5, "samples": 8, "loss": "nan", "seconds": {"compute": 0.1, "exchange": 0.0, "wait": 0.0, "data": 0.0}}
    folder.metrics.write_text("".join(json.dumps({"step": step, **line}) + "\n" for step in range(1, 1001)) + '{"step": 10')
    data = page_data(folder)
    json.dumps(data, allow_nan=False)
    assert not data["ended"]
    assert data["steps"] == sum(data["course"]["count"]) == 1000
    assert len(data["course"]["step"]) == len(data["values"]["loss"]["mean"]) == POINTS
    assert set(data["values"]["loss"]["mean"]) == {None}
    assert sum(data["values"]["loss"]["bad"]) == 1000


def test_a_reader_goes_on(tmp_path: Path) -> None:
    folder = finished(tmp_path)
    reader = MetricsReader(RunFolder(folder))
    reader.read()
    assert page_data(folder, reader) == page_data(folder)


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no run folder"):
        page_data(tmp_path / "nothing")
