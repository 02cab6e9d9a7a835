"""What a run tells of itself while it is under way: whole, by one worker, and never at the cost
of the run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.cluster.control.progress import read_birth
from paceline.record.folder import RunFolder
from paceline.record.live import MAX_EVENTS, LiveRecord, is_writer_alive
from paceline.session.run import Run
from paceline.trace import STEP_PARTS
from tests.harness.runs import batches, workers


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "live.json").read_text())
    return found


def record(tmp_path: Path, *, writes: bool = True, said: list[str] | None = None) -> LiveRecord:
    return LiveRecord(
        RunFolder(tmp_path),
        lambda: writes,
        lambda: {"steps": 3, "live": {"step": 4}},
        [].append if said is None else said.append,
    )


def train(run: Run, each: Callable[[int], None] = lambda step: None) -> None:
    model = nn.Linear(6, 2).double()
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01), batches()
    )
    for _ in run.epochs(1):
        for x, y in loader:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
            each(run.steps)


# Of a run
# --------------------------------------------------------------------------------------------------


def test_it_has_what_is_known_of_the_summary_and_goes_when_that_is_there(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def body(run: Run) -> None:
        if run.rank == 0:
            seen.append(read(tmp_path / "test"))  # before the first step

        def each(step: int) -> None:
            if run.rank == 0 and step == 1:  # the first meeting was after the step before
                run.event("something")
                seen.append(read(tmp_path / "test"))

        train(run, each)

    began = time.time()
    workers(4, body, folder=tmp_path, hosts=(0, 0, 1, 1))
    before, found = seen
    assert (before["steps"], before["final_loss"], before["events"], before["live"]["late"]) == (
        0,
        None,
        [],
        None,
    )
    assert (found["sync"], found["workers"], found["hosts"]) == ("AllReduce()", 4, 2)
    assert (
        found["steps"],
        found["samples"],
        found["live"]["step"],
        found["live"]["total_steps"],
    ) == (1, 8, 1, 5)
    assert found["final_loss"] > 0 and len(found["rank_seconds"]) == len(found["rank_late"]) == 4
    assert found["live"]["cluster"] == [
        {"host": "host0", "ranks": [0, 1]},
        {"host": "host1", "ranks": [2, 3]},
    ]
    assert found["live"]["state"] == "running" and began <= found["live"]["time"] <= time.time()
    # as it is noted, whenever the next step may end
    assert [event["what"] for event in found["events"]] == ["something"]
    late = found["live"]["late"]
    assert (
        late["host"] == f"host{late['rank'] // 2}"
        and 0 <= late["seconds"] <= late["step"]
        and late["cause"]
    )
    recent = found["live"]["recent"]
    assert (recent["steps"], recent["samples"]) == (1, 8) and {
        part: recent[part] for part in STEP_PARTS
    } == pytest.approx(found["step_seconds"], abs=1e-5)
    summary = json.loads((tmp_path / "test" / "summary.json").read_text())
    assert set(found) - set(summary) == {"live"}
    assert not (tmp_path / "test" / "live.json").exists()
    assert [path.name for path in (tmp_path / "test").glob(".*")] == []


def test_checkpoints_and_the_choice_of_a_codec_are_told(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def body(run: Run) -> list[str]:
        def each(step: int) -> None:
            if step == 2:
                run.save()
                run._context.announce_event("codec: int8() is taken")
                if run.rank == 0:
                    seen.append(read(tmp_path / "test"))

        train(run, each)
        return [event["what"] for event in run.events]

    said: list[str] = []
    assert workers(2, body, folder=tmp_path, said=said) == [["codec: int8() is taken"]] * 2
    assert "codec: int8() is taken" in said
    for found in (*seen, json.loads((tmp_path / "test" / "summary.json").read_text())):
        assert [event["what"] for event in found["events"]] == ["codec: int8() is taken"]
        assert [(save["what"], save["step"]) for save in found["saves"]] == [
            ("saved step-00000003", 3)
        ]
        assert found["checkpoints"]["count"] == 1


def test_a_run_that_fails_leaves_why(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        def each(step: int) -> None:
            if step == 3:
                raise ValueError("no\nmore")

        train(run, each)

    with pytest.raises(ValueError, match="no"):
        workers(1, body, folder=tmp_path)
    found = read(tmp_path / "test")
    assert (found["live"]["state"], found["live"]["why"], found["live"]["step"]) == (
        "failed",
        "ValueError: no more",
        3,
    )
    assert not (tmp_path / "test" / "summary.json").exists()


def test_a_folder_that_lets_nothing_in_ends_no_run(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        if run.rank == 0:
            run.folder.live.unlink()
            run.folder.live.mkdir()  # as root may write into anything
            (run.folder.live / "x").touch()
        train(run)

    said: list[str] = []
    workers(2, body, folder=tmp_path, said=said)
    told = [text for text in said if "live.json can't be written (" in text]
    assert (
        told
        and set(told) == {told[0]}
        and told[0].endswith("the run goes on, but can't be watched")
    )
    assert (tmp_path / "test" / "summary.json").exists() and not list(
        (tmp_path / "test").glob(".live*")
    )


# By itself
# --------------------------------------------------------------------------------------------------


def test_only_the_worker_that_writes_does(tmp_path: Path) -> None:
    other = record(tmp_path, writes=False)
    other.update_file()
    other.record_failure(ValueError, None)
    assert list(tmp_path.iterdir()) == []
    record(tmp_path).update_file()
    other.remove_file()
    assert [path.name for path in tmp_path.iterdir()] == ["live.json"]


def test_another_worker_goes_on_with_it(tmp_path: Path) -> None:
    first_writes = True
    first = LiveRecord(
        RunFolder(tmp_path), lambda: first_writes, lambda: {"live": {"rank": 0}}, print
    )
    second = LiveRecord(
        RunFolder(tmp_path), lambda: not first_writes, lambda: {"live": {"rank": 1}}, print
    )
    for rank in range(2):
        first_writes = rank == 0
        first.update_file(), second.update_file()
        assert read(tmp_path)["live"]["rank"] == rank
    (tmp_path / ".live.json.77").touch()  # of a worker that was killed while it wrote
    first.remove_file()
    assert (tmp_path / "live.json").exists()
    second.remove_file()
    assert list(tmp_path.iterdir()) == []


def test_nothing_follows_the_end(tmp_path: Path) -> None:
    live = record(tmp_path)
    live.remove_file()
    live.update_file()
    live.record_failure(ValueError, None)
    assert list(tmp_path.iterdir()) == []
    live = record(tmp_path)
    live.record_failure(KeyboardInterrupt, KeyboardInterrupt())
    live.update_file()
    assert (read(tmp_path)["live"]["state"], read(tmp_path)["live"]["why"]) == (
        "failed",
        "KeyboardInterrupt",
    )


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    live = record(tmp_path, said=said)
    live.update_file()
    before = (tmp_path / "live.json").read_text()

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    live.update_file()
    assert (tmp_path / "live.json").read_text() == before and len(list(tmp_path.iterdir())) == 1
    assert said == [
        (
            f"{tmp_path / 'live.json'} can't be written (No space left on device): "
            "the run goes on, but can't be watched"
        )
    ]


def test_the_last_events_alone_are_told(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        for number in range(MAX_EVENTS + 5):
            run.event(str(number))
        assert [event["what"] for event in read(tmp_path / "test")["events"]] == [
            str(number) for number in range(5, MAX_EVENTS + 5)
        ]

    workers(1, body, folder=tmp_path)


def test_a_link_that_lies_beside_it_leads_nowhere(tmp_path: Path) -> None:
    live, private = record(tmp_path), tmp_path / "private"
    private.write_text("precious")
    (tmp_path / f".live.json.{os.getpid()}").symlink_to(private)
    live.update_file()
    assert (
        private.read_text() == "precious" and read(tmp_path)["live"]["writer"]["pid"] == os.getpid()
    )


def test_who_writes_is_seen_to_live_or_not(tmp_path: Path) -> None:
    record(tmp_path).update_file()
    writer = read(tmp_path)["live"]["writer"]
    assert writer["pid"] == os.getpid() and is_writer_alive(writer) is True
    assert is_writer_alive({**writer, "born": 1}) is False  # another process has its number by now
    gone = subprocess.Popen([sys.executable, "-c", ""])
    born = read_birth(gone.pid)
    gone.wait()
    assert is_writer_alive({**writer, "pid": gone.pid, "born": born}) is False
    assert is_writer_alive({**writer, "machine": "another"}) is None and is_writer_alive({}) is None


def test_who_was_late_is_not_told_of_others_that_have_its_rank_by_now(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        def each(step: int) -> None:
            if run.rank == 0 and step == 3:
                conclusion, agreement = run._ending._conclusion, run._agreement
                assert conclusion.collect_progress()["live"]["late"] is not None
                book = conclusion.log.writer
                assert book is not None and book.latest is not None
                # as one that was lost: nobody has this rank any more
                late = book.latest.late._replace(rank=7)
                book.latest = book.latest._replace(late=late, workers=(*range(8),))
                assert conclusion.collect_progress()["live"]["late"] is None
                assert agreement.origins == (0, 1)

        train(run, each)

    workers(2, body, folder=tmp_path)
