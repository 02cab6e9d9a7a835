"""Facts are those of the summary, and a summary that somebody has made up is told or refused, in
little time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import PacelineError, UsageError
from paceline.observe.page.data import make_page_data
from paceline.observe.report import MAX_EVENTS, format_report
from paceline.record.folder import MEMORY_KINDS
from tests.harness.finished_runs import finished
from tests.harness.strangers import made_up


def summary() -> dict[str, Any]:
    """The fields of a summary that has everything."""
    bytes_of = dict.fromkeys(MEMORY_KINDS, 7)
    served = {
        "name": "s",
        "busy_seconds": 1.0,
        "bytes": 1,
        "bytes_sent": 1,
        "memory_bytes": 1,
        "put_off": 1,
        "staleness": {"0": 1, "1": 4},
    }
    link = {
        "step": 1,
        "words": "w",
        "advice": "a",
        "hosts": ["a", "b"],
        "rate": 1.0,
        "usual": 2.0,
        "gain": 1.0,
    }
    return {
        "mesh": {"data": 2},
        "places": [{"data": 0}, {"data": 1}],
        "axes": {"data": {"seconds": 0.1, "within": 1, "between": 1}},
        "memory": [{"predicted": bytes_of, "measured": bytes_of, "peak": 3}] * 2,
        "loader": {"num_workers": 2, "shares": [3, 3]},
        "links": [link],
        "untold": ["reading"],
        "servers": [
            served
            | {
                "steps_by_workers": {"2": 3},
                "dropped": {"gradients": 1, "samples": 2, "dealt_again": 1},
            }
        ],
        "events": [{"time": 1.0, "what": "x"}],
        "saves": [{"time": 1.0, "what": "saved", "step": 1}],
    }


def test_a_summary_that_is_made_up_is_told_or_refused(tmp_path: Path) -> None:
    folder = finished(
        tmp_path, work=[{"seconds": 0.1, "late": 0.1}] * 2, late=[{"reading": 0.1}] * 2
    )
    good = json.loads((folder / "summary.json").read_text()) | summary()
    (folder / "summary.json").write_text(json.dumps(good))
    assert "data 0" in format_report(folder) and make_page_data(folder)["ranks"] == [
        "rank 0 (data 0)",
        "rank 1 (data 1)",
    ]
    for text in made_up(good, 1000):
        (folder / "summary.json").write_text(text)
        for read in (format_report, make_page_data):
            try:
                found = read(folder)
            except PacelineError:
                continue
            assert isinstance(found, dict) or found.replace("\n", "").isprintable()


MANY: list[dict[str, Any]] = [
    {"workers": 10**9},
    {"workers": 10**9, "mesh": {"data": 10**9}, "places": [{"data": 0}]},
    {"events": [{"time": 1.0, "what": "x"}] * 200_000},
]


@pytest.mark.parametrize("fields", MANY, ids=["workers", "a mesh", "events"])
def test_a_summary_of_more_than_can_be_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = finished(tmp_path)
    (folder / "summary.json").write_text(
        json.dumps(json.loads((folder / "summary.json").read_text()) | fields)
    )
    for read in (format_report, make_page_data):
        with pytest.raises(UsageError, match="is damaged"):
            read(folder)


def test_many_events_are_told_in_short(tmp_path: Path) -> None:
    folder = finished(
        tmp_path,
        events=[{"time": float(at), "what": f"event {at}"} for at in range(MAX_EVENTS + 5)],
    )
    assert (
        "event 4\n" not in format_report(folder)
        and f"event {MAX_EVENTS + 4}" in format_report(folder)
        and f"the last {MAX_EVENTS} of {MAX_EVENTS + 5}" in format_report(folder)
    )


def test_what_moves_the_cursor_of_a_terminal_is_written_out(tmp_path: Path) -> None:
    text = format_report(
        finished(tmp_path, events=[{"time": 1.0, "what": "\x1b]0;title\x07 and \x9b2J"}])
    )
    assert r"\x1b]0;title\x07 and \x9b2J" in text and text.replace("\n", "").isprintable()
