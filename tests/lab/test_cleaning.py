"""Cleaning takes what dead labs have left, and nothing of living ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ResourceError
from paceline.lab import cgroups, cleaning, remains
from paceline.lab.cgroups import CgroupBase

pytestmark = pytest.mark.lab  # cleaning and labs side by side take each other's for remains


def test_living_labs_and_groups_in_use_are_left_alone(pair):
    cluster = pair()
    process = cluster.spawn(0, [sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    assert [line for line in cleaning.remove_leftovers() if cluster.identity in line] == []
    assert process.poll() is None and all(
        folder.exists() for host in cluster.hosts for folder in host.group.folders
    )


def test_groups_without_a_record(tmp_path, monkeypatch):
    monkeypatch.setattr(remains, "records_folder", lambda: tmp_path / "records")
    monkeypatch.setattr(cleaning, "_find_bases", lambda: [CgroupBase("cpu", 1, tmp_path)])
    for name, inside in (("dead", ""), ("used", "1\n")):
        folder = tmp_path / f"{cgroups.PREFIX}{name}-0"
        folder.mkdir()
        if inside:
            (folder / "cgroup.procs").write_text(inside)
    assert cleaning.remove_leftovers() == [
        f"control group {tmp_path}/paceline-lab-dead-0 is removed"
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["paceline-lab-used-0"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_groups_of_other_users_are_theirs(tmp_path, monkeypatch):
    """A lab of another user has its records elsewhere; it may have made its groups, and nobody
    is inside yet.
    """
    monkeypatch.setattr(remains, "records_folder", lambda: tmp_path / "records")
    monkeypatch.setattr(cleaning, "_find_bases", lambda: [CgroupBase("cpu", 1, tmp_path)])
    for name, user in (("mine", 0), ("theirs", 12345)):
        folder = tmp_path / f"{cgroups.PREFIX}{name}-0"
        folder.mkdir()
        os.chown(folder, user, user)
    assert cleaning.remove_leftovers() == [
        f"control group {tmp_path}/paceline-lab-mine-0 is removed"
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["paceline-lab-theirs-0"]


def test_groups_of_a_lab_that_begins_just_now_are_its_own(tmp_path, monkeypatch):
    """It writes its record before it makes groups; both may come about while somebody cleans."""
    monkeypatch.setattr(remains, "records_folder", lambda: tmp_path / "records")
    monkeypatch.setattr(cleaning, "_find_bases", lambda: [CgroupBase("cpu", 1, tmp_path)])
    read_all, begun, calls = (
        remains.read_records,
        tmp_path / f"{cgroups.PREFIX}fresh-0",
        list[int](),
    )

    def read_then_begin() -> list[dict[str, Any]]:
        found = read_all()
        calls.append(len(found))
        if len(calls) < 2:  # the dead are looked for first
            return found
        whose = {
            "identity": "fresh",
            "name": "x",
            "process": os.getpid(),
            "began": remains.start_ticks(os.getpid()),
        }
        remains.write_record({**whose, "keeper": 0, "folder": str(tmp_path / "none"), "hosts": []})
        begun.mkdir()
        return found

    monkeypatch.setattr(remains, "read_records", read_then_begin)
    monkeypatch.setattr(remains, "drop_partial_records", lambda: None)
    assert cleaning.remove_leftovers() == [] and begun.exists() and calls == [0, 0]


def test_what_can_not_be_removed_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(remains, "records_folder", lambda: tmp_path / "records")
    monkeypatch.setattr(cleaning, "_find_bases", list)
    (tmp_path / "group").mkdir()
    (tmp_path / "group" / "file").touch()
    host = {"name": "a", "network": "net:[1]", "cgroups": [str(tmp_path / "group")]}
    whose = {
        "identity": "feed",
        "name": "x",
        "process": 0,
        "began": "1",
        "keeper": 0,
        "folder": str(tmp_path / "none"),
    }
    remains.write_record({**whose, "hosts": [host]})
    with pytest.raises(
        ResourceError,
        match=rf"lab feed \(x\) has leftovers that can't be removed: {tmp_path}/group; end or",
    ):
        cleaning.remove_leftovers()
    (tmp_path / "group" / "file").unlink()
    assert (
        len(cleaning.remove_leftovers()) == 1
        and not Path(tmp_path / "group").exists()
        and not (tmp_path / "records").exists()
    )


def test_whoever_cleans_stays_alive(tmp_path):
    code = (
        "import os; from paceline.lab import cleaning; cleaning.remove_leftovers(); print('alive')"
    )
    environ = {**os.environ, remains.MARK: "feed"}  # in a shell of a lab that was killed
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
        ).stdout
        == "alive\n"
    )
