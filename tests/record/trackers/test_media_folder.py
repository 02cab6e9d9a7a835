"""Histograms and images lie in the run's folder, and those of steps that are taken again go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline.record.folder import RunFolder
from paceline.record.logged.histogram import Histogram, HistogramCounts
from paceline.record.logged.image import Image, Pixels
from paceline.record.logged.media import MediaItem
from paceline.record.trackers.media_folder import MediaFolder, media_file_name

COUNTS = HistogramCounts.from_vector(Histogram(torch.tensor([1.0, 2.0]), 2).to_compact_tensor())
PIXELS = Pixels.from_tensor(Image(torch.eye(2)).to_compact_tensor())


def test_what_was_logged_is_there(tmp_path: Path) -> None:
    kept = MediaFolder(RunFolder(tmp_path))
    kept.log_media([MediaItem(1, 0.5, "weights", COUNTS), MediaItem(2, 1.0, "val/sample", PIXELS)])
    kept.log_media([MediaItem(3, 1.5, "weights", COUNTS)])
    kept.close(failed=False)
    lines = [json.loads(line) for line in (tmp_path / "media.jsonl").read_text().splitlines()]
    assert [(line["step"], line["name"], line["kind"]) for line in lines] == [
        *[(1, "weights", "histogram"), (2, "val/sample", "image"), (3, "weights", "histogram")],
    ]
    assert (lines[0]["counts"], lines[1]["file"]) == ([1, 1], "media/val/sample-2.png")
    assert (tmp_path / lines[1]["file"]).read_bytes() == PIXELS.to_png()
    MediaFolder(RunFolder(tmp_path)).rewind_to_step(2)
    assert [
        json.loads(line)["step"] for line in (tmp_path / "media.jsonl").read_text().splitlines()
    ] == [1, 2]


@pytest.mark.parametrize(
    "name", ["a", "val/a b", "../../x", "/etc/x", "a//b", "..", ".", "ä:1", "a\0b", "%2E"]
)
def test_no_name_leads_elsewhere(name: str, tmp_path: Path) -> None:
    path = (tmp_path / f"{media_file_name(name)}-1.png").resolve()
    assert path.is_relative_to(tmp_path) and "\0" not in str(path)


def test_names_stay_apart() -> None:
    names = ["a/b", "a%2Fb", "a b", "a_b", "..", "%2E%2E"]
    assert len({media_file_name(name) for name in names}) == len(names)
