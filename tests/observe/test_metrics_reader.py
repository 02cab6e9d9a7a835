"""Metrics are read once, as they grow, and never half a line."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.observe.metrics_reader import MetricsReader
from paceline.record.folder import RunFolder

SPLIT = {"compute": 0.4, "exchange": 0.3, "wait": 0.2, "data": 0.1}


def line(step: int, **values: object) -> str:
    return (
        json.dumps({"step": step, "time": step / 2, "samples": 8, "seconds": SPLIT, **values})
        + "\n"
    )


def test_columns(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text(
        line(1, loss=2.0) + '{"step": 1, "time": 0.6, "accuracy": 0.5}\n' + line(2, loss="nan")
    )
    reader = MetricsReader(folder)
    assert reader.read_new_lines()
    assert reader.steps.step.tolist() == [1, 2]
    assert reader.steps.time.tolist() == [0.5, 1.0]
    assert reader.steps.samples.tolist() == [8, 8]
    assert reader.steps.seconds.tolist() == [[0.4, 0.3, 0.2, 0.1]] * 2
    assert sorted(reader.values) == ["accuracy", "loss"]
    assert reader.values["accuracy"].time.tolist() == [0.6]
    first, second = reader.values["loss"].value.tolist()
    assert first == 2.0 and math.isnan(second)


def test_a_file_that_grows(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    reader = MetricsReader(folder)
    assert not reader.read_new_lines()  # no file yet
    folder.metrics.write_text(line(1, loss=1.0) + line(2, loss=2.0)[:20])
    assert reader.read_new_lines() and reader.line_count == 1
    assert not reader.read_new_lines()
    before = reader.steps
    folder.metrics.write_text(line(1, loss=1.0) + line(2, loss=2.0) + line(3, loss=3.0))
    assert reader.read_new_lines() and reader.line_count == 3
    assert reader.values["loss"].value.tolist() == [1, 2, 3]
    assert before.step.tolist() == [1]


def test_a_file_that_was_cut(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text(line(1) + line(2) + line(3))
    reader = MetricsReader(folder)
    reader.read_new_lines()
    other = tmp_path / "other"
    # as a run that goes on from a checkpoint replaces it
    other.write_text(line(1) + line(2) + line(3, loss=7.0) + line(4))
    os.replace(other, folder.metrics)
    reader.read_new_lines()
    assert reader.steps.step.tolist() == [1, 2, 3, 4]
    assert reader.values["loss"].step.tolist() == [3]
    folder.metrics.write_text(line(1))
    reader.read_new_lines()
    assert reader.steps.step.tolist() == [1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (line(1) + "{oops\n" + line(2), "is damaged in line 2"),
        (line(1) + "[1]\n", "is not of this version"),
        (line(1) + '{"step": 2}\n', "is not of this version of paceline: KeyError('time')"),
        (line(1, loss="much"), "is not of this version"),
        (line(1, seconds={"compute": 1}), "is not of this version"),
    ],
)
def test_what_is_damaged(tmp_path: Path, text: str, words: str) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text(text)
    with pytest.raises(UsageError, match=words.replace("(", r"\(").replace(")", r"\)")):
        MetricsReader(folder).read_new_lines()
