"""Where the time went: in all, over the run, and for each worker, those who have left included."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.observe.page.data import make_page_data
from paceline.observe.page.subjects import time_section
from tests.harness.finished_runs import finished
from tests.harness.page_runs import add_members, member, whole
from tests.harness.pages import tree


def test_workers_and_what_there_is_to_say_of_them(tmp_path: Path) -> None:
    assert time_section.list_workers(make_page_data(whole(tmp_path))) == [
        ("rank 0 (shard 0) on A", "", ("members", 0, "seconds")),
        ("rank 1 (shard 1) on B", "steps 36 to 60", ("members", 2, "seconds")),
        ("worker 1 on B (left)", "steps 1 to 25", ("members", 1, "seconds")),
    ]
    assert [
        name for name, _, _ in time_section.list_workers(make_page_data(finished(tmp_path / "old")))
    ] == [
        "rank 0",
        "rank 1",
    ]


def test_a_stack_of_areas_whose_heights_are_the_parts(tmp_path: Path) -> None:
    made = tree(f"<div>{time_section.draw_step_time(make_page_data(whole(tmp_path)))}</div>")
    areas = [path for path in made.iter("path") if path.get("class", "").startswith("fill")]
    assert [path.get("class") for path in areas] == [f"fill k{at}" for at in range(4)]
    # where each ends, at the left
    tops = [float((path.get("d") or "").split(",")[-1].rstrip("Z")) for path in areas]
    heights = [below - above for below, above in zip([220.0, *tops], tops, strict=False)]
    assert [height / sum(heights) for height in heights] == pytest.approx(
        [0.5, 0.3, 0.15, 0.05], abs=0.01
    )


def test_throughput_inside_steps_and_by_the_clock(tmp_path: Path) -> None:
    made = tree(f"<div>{time_section.draw_throughput(make_page_data(whole(tmp_path)))}</div>")
    assert [span[0].tail for span in made.iter("span") if span.get("class") == "key"] == [
        "inside steps",
        "by the clock",
    ]
    assert any("mark lost" in line.get("class", "") for line in made.iter("line"))


def test_many_workers_have_a_limit(tmp_path: Path) -> None:
    folder = finished(tmp_path, workers=100)
    add_members(folder, [member(at, at, "A", 1, 60) for at in range(100)])
    text = time_section.draw_step_time(make_page_data(folder))
    assert (
        text is not None
        and "These are the first 64 of 100 workers" in text
        and text.count("rank 99") == 1
    )


def test_without_a_step(tmp_path: Path) -> None:
    folder = finished(tmp_path)
    (folder / "metrics.jsonl").write_text("")
    assert (
        time_section.draw_step_time(make_page_data(folder)) is None
        and time_section.draw_throughput(make_page_data(folder)) is None
    )
