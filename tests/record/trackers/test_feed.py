"""The first worker's trackers get what the folder gets, in order; another one takes over; what
can't begin or end is said.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.errors import ResourceError, UsageError
from paceline.record.folder import RunFolder
from paceline.record.history import RunHistory
from paceline.record.logged.histogram import Histogram, HistogramCounts
from paceline.record.logged.media import MediaItem
from paceline.record.trackers.feed import TrackerFeed
from paceline.record.trackers.tracker import TrackedStep, Tracker
from paceline.timings import DEFAULT_TIMINGS
from tests.harness.jobs import PATIENCE
from tests.harness.tracked import STEPS, Notes, lines, reported, summary

COUNTS = HistogramCounts.from_vector(Histogram(torch.tensor([1.0, 2.0]), 2).to_compact_tensor())
LINES = [
    {"step": step, "time": 0.5 * step, "loss": 1.0, "samples": 8, "seconds": {"compute": 0.1}}
    for step in range(1, 5)
]
SHORT = replace(DEFAULT_TIMINGS.trackers, quiet=0.0, close=0.0)


def feed(
    folder: Path,
    *trackers: Tracker,
    said: list[str] | None = None,
    again: bool = False,
    events_told: int = 0,
) -> tuple[TrackerFeed, RunHistory]:
    history = RunHistory(7, 1000.0, [].append)
    say = ([] if said is None else said).append
    made = TrackerFeed(
        trackers,
        RunFolder(folder),
        history,
        say,
        settings={"sync": "x"},
        again=again,
        events_told=events_told,
        timings=DEFAULT_TIMINGS.trackers,
    )
    return made, history


def late(step: int) -> Iterable[object]:
    return ()


def test_a_run_is_reported_as_its_folder_has_it(tmp_path: Path) -> None:
    notes, said = Notes(), list[str]()
    folder = reported(tmp_path, [notes], said)
    assert "notes: here" in said
    begun, *told, concluded, closed = notes.told
    assert (
        begun[1].name == "test"
        and begun[1].settings == {"sync": "AllReduce()", "seed": 1}
        and not begun[1].again
    )
    assert [step for kind, step, *_ in told if kind == "step"] == [
        line["step"] for line in lines(folder)
    ]
    assert [each for each in told if each[0] == "media"] == [
        ("media", step, name) for step in (5, 10) for name in ("weights", "sample")
    ]
    assert [what for kind, what in (each for each in told if each[0] == "event")] == [
        each["what"] for each in summary(folder)["events"]
    ]
    assert "epoch 1 is over" in [each[1] for each in told if each[0] == "event"]
    assert concluded[1].results["steps"] == STEPS and concluded[1].results["results/score"] == 0.5
    assert closed == ("close", False)


def test_histograms_come_behind_their_step(tmp_path: Path) -> None:
    notes = Notes()
    made, _ = feed(tmp_path, notes)
    made.begin_trackers()
    made.show_media(
        [
            MediaItem(2, 1.0, "a", COUNTS),
            MediaItem(3, 1.5, "b", COUNTS),
            MediaItem(9, 1.5, "c", COUNTS),
        ]
    )
    made.write_lines(LINES, late)  # type: ignore[arg-type]
    made.close_trackers(failed=False)
    steps = [each[1] for each in notes.told if each[0] in ("step", "media")]
    assert steps == [1, 2, 2, 3, 3, 4, 9]
    assert len((tmp_path / "media.jsonl").read_text().splitlines()) == 3


def test_without_trackers_the_folder_has_them(tmp_path: Path) -> None:
    folder = reported(tmp_path, [])
    assert [path.name for path in sorted((folder / "media").iterdir())] == [
        "sample-10.png",
        "sample-5.png",
    ]
    assert len((folder / "media.jsonl").read_text().splitlines()) == 4


def test_another_worker_takes_over(tmp_path: Path) -> None:
    notes = Notes()
    made, history = feed(tmp_path, notes)
    history.note_event("before")
    made.skip_events()
    history.note_event("lost")
    made.take_over()
    made.write_lines(LINES[2:], late)  # type: ignore[arg-type]
    made.rewind_to_step(3)
    made.close_trackers(failed=True)
    begun, *told = notes.told
    assert begun[1].again and begun[1].identity == history.make_identity(tmp_path.name)
    assert told == [("step", 3), ("step", 4), ("event", "lost"), ("rewind", 3), ("close", True)]


def test_one_that_stood_by_to_the_end_says_nothing(tmp_path: Path) -> None:
    notes = Notes()
    made, _ = feed(tmp_path, notes)
    made.close_trackers(failed=False)
    assert notes.told == []


def test_another_start_tells_of_new_events_alone(tmp_path: Path) -> None:
    notes = Notes()
    made, history = feed(tmp_path, notes, again=True, events_told=1)
    for what in ("told", "why the last start ended"):
        history.note_event(what)
    made.begin_trackers()
    made.write_lines([], late)  # type: ignore[arg-type]
    made.close_trackers(failed=False)
    assert notes.told[0][1].again
    assert notes.told[1] == ("event", "why the last start ended")


def test_what_can_not_begin_ends_the_start(tmp_path: Path) -> None:
    first = Notes("first")
    made, _ = feed(tmp_path, first, Notes("second", RuntimeError("no such\n  place")))
    with pytest.raises(
        UsageError,
        match=(
            r"can't be reported to second \(RuntimeError: no such place\); "
            r"fix that, or leave second out"
        ),
    ):
        made.begin_trackers()
    assert first.told[-1] == ("close", True)


def test_errors_of_ours_stay_what_they_are(tmp_path: Path) -> None:
    made, _ = feed(tmp_path, Notes(fails=ResourceError("port")))
    with pytest.raises(ResourceError, match=r"^port$"):
        made.begin_trackers()


def test_a_run_goes_on_without_a_tracker_that_fails(tmp_path: Path) -> None:
    class Full(Notes):
        def log_steps(self, steps: Iterable[TrackedStep]) -> None:
            raise OSError(28, "No space left on device")

    said: list[str] = []
    other = Notes("other")
    folder = reported(tmp_path, [Full("full"), other], said)
    assert len(lines(folder)) == STEPS + 2
    assert (
        len([line for line in said if line.startswith("full gets nothing more of this run")]) == 1
    )
    assert any("full gets nothing more" in event["what"] for event in summary(folder)["events"])
    assert sum(each[0] == "step" for each in other.told) == STEPS + 2


def test_one_that_hangs_is_waited_for_and_left(tmp_path: Path) -> None:
    class Hangs(Notes):
        go = threading.Event()

        def log_steps(self, steps: Iterable[TrackedStep]) -> None:
            assert self.go.wait(PATIENCE)

    said: list[str] = []
    hangs = Hangs("hangs")
    made = TrackerFeed(
        [hangs], RunFolder(tmp_path), RunHistory(7, 0.0, [].append), said.append, timings=SHORT
    )
    made.begin_trackers()
    made.write_lines(LINES, late)  # type: ignore[arg-type]
    made.close_trackers(failed=False)
    made.close_trackers(failed=False)
    hangs.go.set()
    assert said[1:] == [
        "waiting for hangs to take in the rest of the run, 0 s at most",
        "hangs did not take in all of the run; the run's folder has everything",
    ]
