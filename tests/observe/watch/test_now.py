"""What the folder of a run says of this moment, whole, half-written, or of another version."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from paceline.observe.watch.now import SILENT, LateRank, NowReader, RunNow
from paceline.record.folder import RunFolder
from paceline.record.live import GONE, LiveRecord
from tests.harness.clocks import Clock
from tests.harness.live_runs import PARTS, facts


@pytest.fixture
def record(tmp_path: Path) -> LiveRecord:
    return LiveRecord(RunFolder(tmp_path), lambda: True, facts, print)


def test_all_of_a_run_under_way(tmp_path: Path, record: LiveRecord) -> None:
    record.update()
    now = NowReader(RunFolder(tmp_path)).read()
    assert now == RunNow(
        name=tmp_path.name,
        state="running",
        sync="AllReduce()",
        workers=3,
        cluster=(("a", (0, 1)), ("b", (2,))),
        step=40,
        total_steps=100,
        loss=1.5,
        seconds=12.5,
        samples_per_second=pytest.approx(640.0),
        parts=PARTS,
        late=LateRank(2, "b", 0.05, 0.1, "compute"),
        link="the link of b slow: 10 Mbit/s",
        shares=(16, 16, 32),
        checkpoints=2,
        events=(
            (3.0, "rank 2 was lost"),
            (5.0, "saved step-00000020"),
            (9.0, "shares are now 16 + 16 + 32"),
        ),
    )
    assert now.left == pytest.approx(6.0)


def test_before_there_is_anything(tmp_path: Path) -> None:
    assert NowReader(RunFolder(tmp_path / "none")).read().state == "waiting"


def test_a_run_that_has_ended_or_failed(tmp_path: Path, record: LiveRecord) -> None:
    reader = NowReader(RunFolder(tmp_path))
    record.update()
    assert reader.read().state == "running"
    record.fail(ValueError, ValueError("no"))
    assert (reader.read().state, reader.read().why) == ("failed", "ValueError: no")
    (tmp_path / "live.json").unlink()
    summary = facts()
    del summary["live"]
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    now = reader.read()
    assert (now.state, now.step, now.late, now.link, now.left) == ("ended", 38, None, "", None)
    assert now.parts == dict.fromkeys(PARTS, 0.1) and now.samples_per_second == 500.0


def test_a_job_that_starts_again_in_the_same_folder_is_followed(
    tmp_path: Path, record: LiveRecord
) -> None:
    reader = NowReader(RunFolder(tmp_path))
    record.fail(ValueError, None)
    assert reader.read().state == "failed"
    LiveRecord(RunFolder(tmp_path), lambda: True, lambda: facts(live={"step": 41}), print).update()
    assert (reader.read().state, reader.read().step) == ("running", 41)


@pytest.mark.parametrize(
    "text",
    ["", '{"sync": "All', "[]", "null", '{"live": 3}', json.dumps(facts() | {"events": 5}), "\xff"],
)
def test_what_makes_no_sense_leaves_what_was_known(
    tmp_path: Path, record: LiveRecord, text: str
) -> None:
    reader = NowReader(RunFolder(tmp_path))
    (tmp_path / "live.json").write_bytes(text.encode("latin-1"))
    assert reader.read().state == "waiting"
    record.update()
    assert reader.read().step == 40
    (tmp_path / "live.json").write_bytes(text.encode("latin-1") + b" ")
    assert (reader.read().state, reader.read().step) == ("running", 40)


def test_losses_that_are_no_numbers_are_words(tmp_path: Path) -> None:
    LiveRecord(
        RunFolder(tmp_path), lambda: True, lambda: facts(final_loss=float("nan")), print
    ).update()
    assert NowReader(RunFolder(tmp_path)).read().loss == "nan"


def test_no_word_for_long_and_nobody_who_could_say_one(tmp_path: Path, record: LiveRecord) -> None:
    clock = Clock()
    reader = NowReader(RunFolder(tmp_path), clock=clock)
    record.update()
    assert reader.read().state == "running"
    clock.now += GONE
    assert reader.read().state == "running"  # whoever writes it is there: this process
    clock.now += SILENT
    assert (reader.read().state, reader.quiet) == ("silent", GONE + SILENT)
    found = json.loads((tmp_path / "live.json").read_text())
    found["live"]["writer"]["born"] = 1  # another process has its number now
    (tmp_path / "live.json").write_text(json.dumps(found))
    assert reader.read().state == "running"  # another worker may be about to go on with it
    clock.now += GONE
    assert reader.read().state == "gone"
    record.update()
    assert reader.read().state == "running"


def test_a_file_that_has_not_changed_is_not_read_again(tmp_path: Path, record: LiveRecord) -> None:
    record.update()
    reader = NowReader(RunFolder(tmp_path))
    first = reader.read()
    mark = (tmp_path / "live.json").stat()
    (tmp_path / "live.json").write_text(" " * mark.st_size)
    os.utime(tmp_path / "live.json", ns=(mark.st_atime_ns, mark.st_mtime_ns))
    assert reader.read() is first
