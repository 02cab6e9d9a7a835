"""`paceline probe`: its script in a job, and the file that it leaves."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.bench import probe
from paceline.cluster import topology_file
from tests.harness import nursery
from tests.harness.jobs import Jobs


def test_the_command_writes_what_it_shows(job: Jobs) -> None:
    command = [
        sys.executable,
        *job.launcher,
        "probe",
        "--workers",
        "2",
        "--dtypes",
        "float32",
        "--out",
        "found.json",
    ]
    ended = job.start(command).end()
    assert ended.code == 0, ended.err
    assert ended.out.startswith("2 workers on 1 host\n") and "GFLOP/s" in ended.out
    assert ("what is odd:\n- " in ended.out) != ("nothing is odd" in ended.out)
    assert f"written to {job.folder / 'found.json'}" in ended.out and "run.prepare" not in ended.err
    topology = topology_file.read_topology(job.folder / "found.json")
    assert topology.size == 2 and len(topology.relative_speeds()) == 2
    assert sorted(path.name for path in job.folder.iterdir()) == ["found.json"]
    again = job.start([*command[:-1], "again.json", "--hosts", "0"]).end()
    assert again.code == 2 and "--hosts is 0" in again.err


def test_an_interrupt_ends_it_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(vars(paceline), "start", interrupted)
    monkeypatch.setattr(sys, "argv", ["probe.py"])
    with pytest.raises(SystemExit, match=r"^130$"):
        runpy.run_path(probe.__file__, run_name="__main__")


@pytest.mark.slow
def test_a_file_that_is_no_cluster_stays(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("{}")
    answer = nursery.run_script(
        Path(probe.__file__),
        tmp_path,
        "--folder",
        str(tmp_path),
        "--out",
        str(tmp_path / "notes.json"),
    )
    assert (
        answer.returncode != 0
        and "would replace a file that isn't a measured cluster" in answer.stderr
    )
    assert (tmp_path / "notes.json").read_text() == "{}"
