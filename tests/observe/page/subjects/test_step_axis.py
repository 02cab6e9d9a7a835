"""Steps have their times, and events their steps."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.observe.page.subjects import step_axis

COURSE = {"step": [10.0, 20.0], "time": [1.0, 3.0]}


def data(*events: dict[str, Any], **summary: Any) -> dict[str, Any]:
    return {"course": COURSE, "events": list(events), "summary": summary}


def test_when_a_step_was() -> None:
    when = step_axis.make_step_clock(data())
    assert when is not None
    assert (when(0.0), when(10.0), when(15.0)) == ("0 s", "1 s", "2 s")
    assert step_axis.make_step_clock({"course": {"step": [], "time": []}}) is None


def test_events_are_where_they_happened() -> None:
    lost, fault = (
        {"time": 2.5, "what": "a", "kind": "lost"},
        {"time": 9.0, "what": "b", "kind": "fault", "step": 12},
    )
    saved = {"time": 2.5, "what": "c", "kind": "checkpoint"}
    found = step_axis.make_marks(
        data(lost, fault, saved, log_began=0.5)
    )  # 2 s after the first step began
    assert [(mark.x, mark.kind) for mark in found] == [
        (pytest.approx(15.0), "lost"),
        (12.0, "fault"),
    ]
    assert (
        step_axis.make_marks({"course": {"step": [], "time": []}, "events": [lost], "summary": {}})
        == []
    )


def test_the_axis_begins_at_nought_where_steps_begin_near_it() -> None:
    assert step_axis.make_step_axis([1.0, None, 100.0]).low == 0
    assert step_axis.make_step_axis([900.0, 1000.0]).low == 900
    assert step_axis.make_step_axis([]).high > 0
