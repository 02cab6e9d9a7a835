"""A pipeline is drawn by its schedule, with the times of its actions."""

from __future__ import annotations

from pathlib import Path

from paceline.observe.page.data import make_page_data
from paceline.observe.page.subjects import pipeline_section
from paceline.record.pipeline_profile import combine_workers
from paceline.record.timeline import ClockOffset
from tests.harness.finished_runs import finished
from tests.harness.page_runs import whole
from tests.harness.pages import tree
from tests.harness.pipeline_profiles import measured


def test_actions_and_stages(tmp_path: Path) -> None:
    profile = combine_workers(
        measured("1f1b", [0.01, 0.02], micro_batches=4), [0, 1], [ClockOffset()] * 2
    )
    assert profile is not None
    data = make_page_data(
        finished(
            tmp_path,
            pipelines=[profile.to_fields()],
            mesh={"stage": 2},
            places=[{"stage": 0}, {"stage": 1}],
        )
    )
    made = tree(f"<div>{pipeline_section.draw_pipelines(data)}</div>")
    actions = [
        rect
        for rect in made.iter("rect")
        if "action" in rect.get("class", "") and "%" in rect.get("width", "")
    ]
    assert len(actions) == 2 * 4 * 2
    titles = [next(rect.iter("title")).text or "" for rect in actions]
    assert titles[0] == "forward of micro-batch 0 in stage 0: 0.0 ms to 10.0 ms"
    rows = [["".join(cell.itertext()) for cell in row] for row in made.iter("tr")]
    assert rows[1][:5] == [
        "0",
        "rank 0 (stage 0)",
        profile.stages[0].layers[0],
        "10.0 ms",
        "20.0 ms",
    ]
    assert f"{profile.bubble:.1%}" in "".join(made.itertext())


def test_none(tmp_path: Path) -> None:
    assert pipeline_section.draw_pipelines(make_page_data(whole(tmp_path))) is None
