"""What checkpoints cost is there, if there were any."""

from __future__ import annotations

from pathlib import Path

from paceline.observe.page.data import make_page_data
from paceline.observe.page.subjects import checkpoint_section
from tests.harness.finished_runs import finished
from tests.harness.page_runs import whole


def test_costs(tmp_path: Path) -> None:
    text = checkpoint_section.draw_checkpoints(make_page_data(whole(tmp_path, seconds=30.0)))
    assert text is not None
    assert "Training stood still for them for 1.0% of the run." in text
    assert "5.0 MB" in text and "300.0 ms" in text and "the best" not in text


def test_the_best(tmp_path: Path) -> None:
    saved = {
        "count": 1,
        "stall_seconds": 0.1,
        "write_seconds": 0.1,
        "best": {"checkpoint": "step-00000009", "metric": 0.75},
    }
    assert "step-00000009 with <data" in (
        checkpoint_section.draw_checkpoints(make_page_data(whole(tmp_path, checkpoints=saved)))
        or ""
    )


def test_none(tmp_path: Path) -> None:
    assert checkpoint_section.draw_checkpoints(make_page_data(finished(tmp_path))) is None
