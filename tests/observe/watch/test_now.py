"""What the folder of a run says of this moment, whole, half-written, or of another version."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from paceline.observe.watch.now import SILENT_SECONDS, LateRank, NowReader, RunNow
from paceline.record.folder import RunFolder
from paceline.record.live import GONE_SECONDS, LiveRecord
from tests.harness.clocks import Clock
from tests.harness.live_runs import PARTS, facts


@pytest.fixture
def record(tmp_path: Path) -> LiveRecord:
    return LiveRecord(RunFolder(tmp_path), lambda: True, facts, print)


def test_all_of_a_run_under_way(tmp_path: Path, record: LiveRecord) -> None:
    record.update_file()
    now = NowReader(RunFolder(tmp_path)).read_state()
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
    assert now.seconds_left == pytest.approx(6.0)


def test_before_there_is_anything(tmp_path: Path) -> None:
    assert NowReader(RunFolder(tmp_path / "none")).read_state().state == "waiting"


def test_a_run_that_has_ended_or_failed(tmp_path: Path, record: LiveRecord) -> None:
    reader = NowReader(RunFolder(tmp_path))
    record.update_file()
    assert reader.read_state().state == "running"
    record.record_failure(ValueError, ValueError("no"))
    assert (reader.read_state().state, reader.read_state().why) == ("failed", "ValueError: no")
    (tmp_path / "live.json").unlink()
    summary = facts()
    del summary["live"]
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    now = reader.read_state()
    assert (now.state, now.step, now.late, now.link, now.seconds_left) == (
        "ended",
        38,
        None,
        "",
        None,
    )
    assert now.parts == dict.fromkeys(PARTS, 0.1) and now.samples_per_second == 500.0


def test_a_job_that_starts_again_in_the_same_folder_is_followed(
    tmp_path: Path, record: LiveRecord
) -> None:
    reader = NowReader(RunFolder(tmp_path))
    record.record_failure(ValueError, None)
    assert reader.read_state().state == "failed"
    LiveRecord(
        RunFolder(tmp_path), lambda: True, lambda: facts(live={"step": 41}), print
    ).update_file()
    assert (reader.read_state().state, reader.read_state().step) == ("running", 41)


@pytest.mark.parametrize(
    "text",
    ["", '{"sync": "All', "[]", "null", '{"live": 3}', json.dumps(facts() | {"events": 5}), "\xff"],
)
def test_what_makes_no_sense_leaves_what_was_known(
    tmp_path: Path, record: LiveRecord, text: str
) -> None:
    reader = NowReader(RunFolder(tmp_path))
    (tmp_path / "live.json").write_bytes(text.encode("latin-1"))
    assert reader.read_state().state == "waiting"
    record.update_file()
    assert reader.read_state().step == 40
    (tmp_path / "live.json").write_bytes(text.encode("latin-1") + b" ")
    assert (reader.read_state().state, reader.read_state().step) == ("running", 40)


def test_losses_that_are_no_numbers_are_words(tmp_path: Path) -> None:
    LiveRecord(
        RunFolder(tmp_path), lambda: True, lambda: facts(final_loss=float("nan")), print
    ).update_file()
    assert NowReader(RunFolder(tmp_path)).read_state().loss == "nan"


def test_no_word_for_long_and_nobody_who_could_say_one(tmp_path: Path, record: LiveRecord) -> None:
    clock = Clock()
    reader = NowReader(RunFolder(tmp_path), clock=clock)
    record.update_file()
    assert reader.read_state().state == "running"
    clock.now += GONE_SECONDS
    assert reader.read_state().state == "running"  # whoever writes it is there: this process
    clock.now += SILENT_SECONDS
    assert (reader.read_state().state, reader.quiet_seconds) == (
        "silent",
        GONE_SECONDS + SILENT_SECONDS,
    )
    found = json.loads((tmp_path / "live.json").read_text())
    found["live"]["writer"]["born"] = 1  # another process has its number now
    (tmp_path / "live.json").write_text(json.dumps(found))
    assert reader.read_state().state == "running"  # another worker may be about to go on with it
    clock.now += GONE_SECONDS
    assert reader.read_state().state == "gone"
    record.update_file()
    assert reader.read_state().state == "running"


def test_a_file_that_has_not_changed_is_not_read_again(tmp_path: Path, record: LiveRecord) -> None:
    record.update_file()
    reader = NowReader(RunFolder(tmp_path))
    first = reader.read_state()
    mark = (tmp_path / "live.json").stat()
    (tmp_path / "live.json").write_text(" " * mark.st_size)
    os.utime(tmp_path / "live.json", ns=(mark.st_atime_ns, mark.st_mtime_ns))
    assert reader.read_state() is first
