"""Who was late, for what, and when."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.observe.page.data import make_page_data
from paceline.observe.page.subjects import lateness_section
from tests.harness.finished_runs import finished
from tests.harness.page_runs import whole
from tests.harness.pages import tree


def test_lateness_of_those_who_left_too(tmp_path: Path) -> None:
    made = tree(f"<div>{lateness_section.draw_lateness(make_page_data(whole(tmp_path)))}</div>")
    labels = [span.text for span in made.iter("span") if span.get("class") == "label"]
    assert labels[:3] == ["rank 0 (shard 0) on A", "rank 1 (shard 1) on B", "worker 1 on B (left)"]
    ends = ["".join(span.itertext()) for span in made.iter("span") if span.get("class") == "end"]
    assert ends == ["0.0 ms", "2.0 ms", "1.0 ms"]


def test_over_the_run(tmp_path: Path) -> None:
    made = tree(f"<div>{lateness_section.draw_lateness(make_page_data(whole(tmp_path)))}</div>")
    shades = [
        rect.get("class")
        for rect in made.iter("rect")
        if "shade" in rect.get("class", "") and "%" in rect.get("width", "")
    ]
    # the second was late by a tenth, the third by a fifth
    assert shades == ["shade s0"] * 6 + ["shade s1"] * 2 + ["shade s2"] * 3


@pytest.mark.parametrize(("late", "shade"), [(0.0, 0), (0.05, 1), (0.2, 2), (0.4, 3), (0.9, 4)])
def test_shades(late: float, shade: int) -> None:
    assert lateness_section.shade_of_lateness(late) == shade


def test_one_worker_is_never_late(tmp_path: Path) -> None:
    assert lateness_section.draw_lateness(make_page_data(finished(tmp_path, workers=1))) is None
