"""Events have a row for each kind, a shape of their own, and their words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.observe.page.data import make_page_data
from paceline.observe.page.events import EVENT_KINDS
from paceline.observe.page.subjects import event_section
from tests.harness.finished_runs import finished
from tests.harness.page_runs import whole
from tests.harness.pages import tree


def section(folder: Path) -> Any:
    return tree(f"<div>{event_section.draw_events(make_page_data(folder))}</div>")


def test_rows(tmp_path: Path) -> None:
    made = section(whole(tmp_path))
    assert [span.text for span in made.iter("span") if span.get("class") == "label"] == [
        "lost",
        "came",
        "checkpoint",
        "fault",
        None,
    ]
    shapes = {
        mark.get("class"): mark[0].get("d")
        for mark in made.iter("svg")
        if "event" in mark.get("class", "").split() and mark.get("x")
    }
    assert (
        set(shapes) == {"event lost", "event came", "event checkpoint", "event fault"}
        and len(set(shapes.values())) == 4
    )
    words = [item[-1].tail for item in made.iter("li")]
    # in the order of their times
    assert words[1] == "saved step-00000030" and words[3] == "kill(rank=1, step=25)"


def test_every_kind_has_a_shape(tmp_path: Path) -> None:
    events = [{"time": 1.0, "what": "x", "event": kind} for kind in EVENT_KINDS]
    assert len([*section(whole(tmp_path, events=events, saves=[])).iter("li")]) == len(EVENT_KINDS)


def test_of_many_checkpoints_the_marks_alone_are_there(tmp_path: Path) -> None:
    saves = [{"time": at / 100, "what": f"saved {at}", "step": at} for at in range(500)]
    made = section(whole(tmp_path, saves=saves))
    assert len([*made.iter("li")]) == 3 and "500 more events" in "".join(made.itertext())


def test_none(tmp_path: Path) -> None:
    assert event_section.draw_events(make_page_data(finished(tmp_path))) is None
