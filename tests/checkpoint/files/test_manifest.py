"""A manifest says what it was sealed with, and a metric in it is taken for one only if it is
one.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.files.manifest import (
    MANIFEST_FILE,
    BrokenCheckpoint,
    Metric,
    NewerCheckpoint,
    parse_contents,
    parse_step,
    read_manifest,
    seal_manifest,
)

FILES = {name: {"nbytes": 1, "sha256": "0"} for name in ("state.json", "tensors.safetensors")}


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "step-00000040"
    path.mkdir(exist_ok=True)
    (path / MANIFEST_FILE).write_bytes(
        seal_manifest({"format": 1, "step": 40, "serial": 3, "own": [], "files": FILES} | changes)
    )
    return path


def test_there_and_back(tmp_path: Path) -> None:
    path = written(tmp_path, metric=Metric(0.25, "max").to_fields())
    found = read_manifest(path)
    assert (
        found["serial"] == 3
        and Metric.from_manifest(found) == Metric(0.25, "max")
        and parse_step(path) == 40
    )
    step, own, files = parse_contents(path, found)
    assert (step, own, set(files)) == (40, {}, set(FILES))


def test_one_that_was_changed_is_broken(tmp_path: Path) -> None:
    path = written(tmp_path, metric=Metric(0.25, "min").to_fields())
    text = (path / MANIFEST_FILE).read_text()
    (path / MANIFEST_FILE).write_text(text.replace("0.25", "0.05"))
    with pytest.raises(
        BrokenCheckpoint, match="is damaged: it doesn't have the hash it was written with"
    ):
        read_manifest(path)
    with pytest.raises(NewerCheckpoint, match="format 9"):
        read_manifest(written(tmp_path, format=9))
    with pytest.raises(BrokenCheckpoint, match=r"'\.\./up', which is not a valid file name"):
        parse_contents(path, read_manifest(written(tmp_path, files={"../up": {}})))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_counts(value: float) -> None:
    fields = json.loads(json.dumps(Metric(value, "min").to_fields()))
    found = Metric.from_manifest({"metric": fields})
    assert fields == {"best": "min", "value": None} and found is not None and not found.is_finite


@pytest.mark.parametrize(
    "metric",
    [
        None,
        3,
        "0.1",
        [],
        {"value": 1.0},
        {"best": "most", "value": 1.0},
        {"best": ["min"], "value": 1.0},
    ]
    + [
        {"best": "min", "value": value}
        for value in ("1", True, [1], {}, 10**400, math.nan, math.inf)
    ],
)
def test_something_else_is_no_metric(metric: Any) -> None:
    assert Metric.from_manifest({"metric": metric}) is None


def test_the_smallest_or_the_largest_comes_first() -> None:
    assert (
        Metric(1.0, "min").sort_key < Metric(2.0, "min").sort_key
        and Metric(2.0, "max").sort_key < Metric(1.0, "max").sort_key
    )
