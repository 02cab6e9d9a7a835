"""The course of a run in stretches: nothing is lost of what is summed, and what isn't known is
no number.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.observe.metrics_reader import MetricsReader
from paceline.observe.page.course import (
    MAX_CURVES,
    MAX_LOOKS,
    summarize_looks,
    summarize_steps,
    summarize_values,
    to_json_numbers,
)
from paceline.record.folder import RunFolder

SPLIT = {"compute": 0.4, "exchange": 0.3, "wait": 0.2, "data": 0.1}


def reader(tmp_path: Path, *lines: dict[str, object]) -> MetricsReader:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = MetricsReader(folder)
    found.read_new_lines()
    return found


def step(number: int, **more: object) -> dict[str, object]:
    return {"step": number, "time": float(number), "samples": 8, "seconds": SPLIT, **more}


def test_sums_stay(tmp_path: Path) -> None:
    found = summarize_steps(
        reader(
            tmp_path,
            *(step(number, bytes_sent={"within": 2, "between": 3}) for number in range(1, 1001)),
        )
    )
    assert sum(found["count"]) == 1000 and sum(found["samples"]) == 8000
    assert sum(found["seconds"]["wait"]) == pytest.approx(200)
    assert sum(found["bytes_sent"]["between"]) == 3000
    assert found["step"][-1] == found["time"][-1] == 1000


def test_bytes_up_to_each_step(tmp_path: Path) -> None:
    told = [
        step(number, loss=1.0, bytes_sent={"within": 0, "between": 10 * number})
        for number in range(1, 5)
    ]
    assert summarize_values(reader(tmp_path, *told), None)["loss"]["between"] == [10, 30, 60, 100]
    untold = [step(number, loss=1.0) for number in range(1, 5)]
    usual = {"within": 1.0, "between": 5.0}
    assert summarize_values(reader(tmp_path, *untold), usual)["loss"]["between"] == [5, 10, 15, 20]


def test_loss_is_first_and_names_have_a_limit(tmp_path: Path) -> None:
    found = summarize_values(
        reader(tmp_path, step(1, **{f"a{at:02}": 1.0 for at in range(40)}, loss=1.0)), None
    )
    assert next(iter(found)) == "loss" and len(found) == MAX_CURVES


def test_what_single_workers_did(tmp_path: Path) -> None:
    there = {"0": [10, 4.0, 3.0, 2.0, 1.0, 5.0], "1": [10, 10.0, 0.0, 0.0, 0.0, 0.0]}
    found = summarize_looks(
        reader(
            tmp_path,
            step(10, ranks=there),
            step(20, ranks={"0": there["0"]}),
            step(30, ranks={"0": [0, *[0.0] * 5]}),
        )
    )
    assert found["time"] == [10, 20, 30]
    assert found["workers"] == {
        "0": [[0.4, 0.3, 0.2, 0.1, 0.5]] * 2 + [None],
        "1": [[1.0, 0.0, 0.0, 0.0, 0.0], None, None],
    }
    many = summarize_looks(
        reader(tmp_path, *(step(number, ranks=there) for number in range(1, 1000)))
    )
    assert len(many["time"]) == len(many["workers"]["0"]) == MAX_LOOKS
    assert summarize_looks(reader(tmp_path)) == {"step": [], "time": [], "workers": {}}


def test_numbers() -> None:
    assert to_json_numbers([1.0, float("nan"), float("inf")]) == [1.0, None, None]
