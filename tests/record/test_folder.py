"""Every run has a folder of its own, and its files are there in full or not at all."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.comm.agreement import Agreement
from paceline.errors import PacelineError, ResourceError, UsageError
from paceline.record.folder import (
    RunFolder,
    RunSummary,
    RunTotals,
    to_strict_json,
    write_atomically,
)
from tests.harness.thread_groups import ThreadGroup, spawn


def silent(text: str) -> None:
    raise AssertionError(f"nothing to say, but said: {text}")


def test_a_name_that_is_taken_is_numbered_and_said(tmp_path: Path) -> None:
    said: list[str] = []
    folders = [
        RunFolder.create_folder(tmp_path / "runs", "a[1]", say=said.append) for _ in range(3)
    ]
    assert [folder.name for folder in folders] == ["a[1]", "a[1]-2", "a[1]-3"]
    assert said == [
        "there is a run a[1] already: this one is a[1]-2",
        "there is a run a[1] already: this one is a[1]-3",
    ]
    # what a resume may go on from, newest first
    assert folders[2].earlier == (folders[1].path, folders[0].path)
    assert folders[0].earlier == ()


def test_other_runs_are_not_earlier_ones(tmp_path: Path) -> None:
    for name in ("run-2", "run-x", "running", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "run-3").write_text("a file")
    assert [
        path.name
        for path in RunFolder.create_folder(tmp_path, "run", say=lambda text: None).earlier
    ] == ["run-2", "run"]
    assert RunFolder.create_folder(tmp_path, "ru", say=silent).earlier == ()


def test_a_run_that_was_called_by_a_number_is_no_earlier_run_of_another(tmp_path: Path) -> None:
    """As in a search for a learning rate: runs lr-1 and lr-2, and then one called lr, which is
    not to resume from them.
    """
    first, second = (
        RunFolder.create_folder(tmp_path, f"lr-{number}", say=silent) for number in (1, 2)
    )
    plain = RunFolder.create_folder(tmp_path, "lr", say=silent)
    assert plain.earlier == ()
    third = RunFolder.create_folder(tmp_path, "lr", say=lambda text: None)
    assert (third.name, third.earlier) == ("lr-3", (plain.path,))
    assert RunFolder.reopen_folder(third.path, "lr").earlier == (plain.path,)
    assert RunFolder.create_folder(tmp_path, "lr-2", say=lambda text: None).earlier == (
        second.path,
    )
    assert RunFolder.create_folder(tmp_path, "lr", say=lambda text: None).earlier == (
        third.path,
        plain.path,
    )
    assert [path for path in (first.path, plain.path) if (path / ".name").exists()] == [first.path]


def test_without_a_name_it_is_the_time(tmp_path: Path) -> None:
    names = {RunFolder.create_folder(tmp_path, None, say=silent).name for _ in range(5)}
    assert len(names) == 5
    assert all(name.startswith("20") for name in names)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", ".hidden", "a/b", "/absolute", "a\\b", "a\0b", "a\nb", "\x1b[2J", "\udcff"],
)
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="can't be called"):
        RunFolder.create_folder(tmp_path, name, say=silent)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(
        UsageError,
        match=r"can't be created \(Not a directory\); give another place, start\(folder=\.\.\.\)",
    ):
        RunFolder.create_folder(tmp_path / "runs", "a", say=silent)


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def looping(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize(
    ("make", "name", "why"),
    [
        (dangling, "a", r".*runs is a link to nowhere, which is not there"),
        (dangling, None, r".*runs is a link to nowhere, which is not there"),
        (looping, "a", r".*runs is a link to .*runs, which is not there"),
        (Path.touch, None, "Not a directory"),
        (Path.mkdir, "a" * 300, "File name too long"),
    ],
)
def test_a_place_where_no_folder_can_be_made(
    tmp_path: Path, make: Callable[[Path], Any], name: str | None, why: str
) -> None:
    """It doesn't try for ever."""
    make(tmp_path / "runs")
    with pytest.raises(
        UsageError, match=rf"can't be created \({why}\); give another place, start\(folder=\.\.\.\)"
    ):
        RunFolder.create_folder(tmp_path / "runs", name, say=silent)


def test_a_run_that_is_a_dangling_link_is_taken(tmp_path: Path) -> None:
    dangling(tmp_path / "a")
    said: list[str] = []
    assert RunFolder.create_folder(tmp_path, "a", say=said.append).name == "a-2" and len(said) == 1


def test_all_workers_have_the_same_folder(tmp_path: Path) -> None:
    def body(group: ThreadGroup) -> RunFolder:
        return RunFolder.create_together(Agreement(group), tmp_path, "a", say=silent)

    folders = spawn(3, body)
    assert {folder.path for folder in folders} == {tmp_path / "a"}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_all_workers_hear_of_a_failure(tmp_path: Path) -> None:
    def body(group: ThreadGroup) -> str:
        with pytest.raises(PacelineError, match="can't be called 'a/b'") as caught:
            RunFolder.create_together(Agreement(group), tmp_path, "a/b", say=silent)
        return type(caught.value).__name__

    # the launcher knows the second for an echo
    assert spawn(3, body) == ["UsageError", "Mismatch", "Mismatch"]


def summary(**changes: Any) -> RunSummary:
    parts = {"compute": 0.1, "exchange": 0.02, "wait": 0.0, "data": 0.0}
    totals = RunTotals(10, 640, 2.5, 533.3, changes.pop("loss", 1.5), parts, [parts])
    saved = {"count": 1, "stall_seconds": 0.05, "write_seconds": 0.4, "nbytes": 1000}
    return RunSummary(
        "AllReduce()",
        1,
        1,
        totals,
        {"within": 1e6, "between": 0.0},
        [],
        "ab" * 32,
        saved,
        [{"time": 0.1, "what": "joined"}],
    )


def test_the_summary_has_every_field(tmp_path: Path) -> None:
    folder = RunFolder.create_folder(tmp_path, "a", say=silent)
    summary().write(folder)
    found = json.loads(folder.summary.read_text())
    assert list(found) == [
        *(
            "sync",
            "workers",
            "hosts",
            "steps",
            "samples",
            "seconds",
            "samples_per_second",
            "final_loss",
            "step_seconds",
        ),
        *(
            "rank_seconds",
            "rank_work",
            "rank_late",
            "members",
            "logged",
            "bytes_sent",
            "codecs",
            "parameters_sha256",
            "checkpoints",
            "events",
            "saves",
            "servers",
            "loader",
            "mesh",
            "places",
            "axes",
            "memory",
            "log_began",
            "untold",
            "route",
            "links",
            "pipelines",
            "goodput",
            "settings",
            "results",
        ),
    ]
    assert found["step_seconds"]["exchange"] == 0.02
    assert [path.name for path in folder.path.iterdir()] == ["summary.json"]


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@pytest.mark.parametrize(("loss", "written"), [(math.nan, "nan"), (math.inf, "inf"), (None, None)])
def test_a_loss_that_is_no_number_is_still_json(tmp_path: Path, loss: float, written: str) -> None:
    folder = RunFolder.create_folder(tmp_path, "a", say=silent)
    summary(loss=loss).write(folder)
    assert json.loads(folder.summary.read_text(), parse_constant=refuse)["final_loss"] == written


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"
    write_atomically(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        ResourceError,
        match=r"x\.json could not be written \(No space left on device\); free some space",
    ):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


def test_a_link_that_lies_beside_a_file_leads_nowhere(tmp_path: Path) -> None:
    """Others may write to the folder of a run."""
    private = tmp_path / "private"
    private.write_text("precious")
    for name in ("x.json", f".x.json.{os.getpid()}"):
        (tmp_path / name).symlink_to(private)
    write_atomically(tmp_path / "x.json", "new")
    assert (
        private.read_text() == "precious"
        and (tmp_path / "x.json").read_text() == "new"
        and not (tmp_path / "x.json").is_symlink()
    )


def test_where_nothing_can_be_removed_either_it_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(
        ResourceError, match=r"x\.json could not be written \(Read-only file system\)"
    ):
        write_atomically(tmp_path / "x.json", "new")


def test_the_folder_of_a_job_that_starts_again(tmp_path: Path) -> None:
    first, second, third = (
        RunFolder.create_folder(tmp_path, "run", say=lambda text: None) for _ in range(3)
    )
    assert RunFolder.reopen_folder(second.path, "run") == second and second.earlier == (first.path,)
    assert RunFolder.reopen_folder(third.path, "run") == third
    assert RunFolder.reopen_folder(third.path, None) == RunFolder(third.path, (), named=False)


def test_json_is_strict() -> None:
    plain = {"a": [1, 2.5, None], "b": {"c": (True, "d")}}
    assert to_strict_json(plain) == '{"a": [1, 2.5, null], "b": {"c": [true, "d"]}}'
    found = to_strict_json({**plain, "e": ({"f": -math.inf}, math.nan)}, indent=1)
    assert json.loads(found, parse_constant=pytest.fail) == {
        "a": [1, 2.5, None],
        "b": {"c": [True, "d"]},
        "e": [{"f": "-inf"}, "nan"],
    }
    assert found.count("\n") > 10
