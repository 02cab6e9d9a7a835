"""The command line: what reaches the launcher, what is refused, and with which exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from paceline import cli
from paceline.cluster.launcher import launch
from paceline.cluster.launcher.request import LaunchRequest
from paceline.errors import CheckpointError


class Launcher:
    """Stands for cluster/launcher/launch.py: keeps what it was asked to run."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.jobs: list[LaunchRequest] = []
        self.environs: list[dict[str, str]] = []

    def run(self, job: LaunchRequest, environ: dict[str, str], watcher: object = None) -> int:
        self.jobs.append(job)
        self.environs.append(environ)
        return self.code


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    stand_in = Launcher()
    monkeypatch.setattr(launch, "run_job", stand_in.run)
    monkeypatch.delenv("PACELINE_INTERFACE", raising=False)
    return stand_in


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit code of `paceline WORDS`."""
    monkeypatch.setattr(sys, "argv", ["paceline", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_what_stands_after_the_script_is_the_scripts(
    monkeypatch: pytest.MonkeyPatch, launcher: Launcher
) -> None:
    assert call(monkeypatch, "run", "-n", "3", "train.py", "--workers", "9", "-x", "--", "y") == 0
    job = launcher.jobs[0]
    assert (job.script, job.workers) == ("train.py", 3)
    assert list(job.args) == ["--workers", "9", "-x", "--", "y"]


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--workers", "5"], "workers", 5),
        (["--hosts", "2"], "hosts", 2),
        (["--join", "a:29400"], "join", "a:29400"),
        (["--host-rank", "1"], "host_rank", 1),
        (["--secret-file", "s"], "secret_file", Path("s")),
        (["--threads", "7"], "threads", 7),
        (["--sync", "AllReduce(via='ring')"], "sync", "AllReduce(via='ring')"),
        (["--mesh", "data, tensor=2"], "mesh", "data, tensor=2"),
        (["--name", "x"], "name", "x"),
        (["--placement", "round-robin"], "placement", "round-robin"),
    ],
)
def test_options_reach_the_job(
    monkeypatch: pytest.MonkeyPatch, launcher: Launcher, words: list[str], field: str, value: Any
) -> None:
    assert call(monkeypatch, "run", *words, "train.py") == 0
    assert getattr(launcher.jobs[0], field) == value


def test_the_interface_reaches_all_of_it(
    monkeypatch: pytest.MonkeyPatch, launcher: Launcher
) -> None:
    monkeypatch.setenv("KEPT", "yes")
    assert call(monkeypatch, "run", "--interface", "eth1", "train.py") == 0
    assert call(monkeypatch, "run", "train.py") == 0
    with_it, without = launcher.environs
    assert with_it["PACELINE_INTERFACE"] == "eth1" and with_it["KEPT"] == "yes"
    assert "PACELINE_INTERFACE" not in without


def test_the_exit_code_is_the_scripts(monkeypatch: pytest.MonkeyPatch, launcher: Launcher) -> None:
    launcher.code = 7
    assert call(monkeypatch, "run", "train.py") == 7


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--sync", "AllRedcue()", "train.py"], "did you mean AllReduce?"),
        (["run", "--sync", "AllReduce(", "train.py"], "can't be read"),
        (["run", "--sync", "AllReduce(via='rign')", "train.py"], "did you mean ring?"),
        (["run", "--sync", "int8()", "train.py"], "int8() is not a strategy"),
        (["run", "--cut", "shrad('blocks.*')", "train.py"], "shrad is not a word of the notation"),
        (["run", "--cut", "shard(", "train.py"], "can't be read"),
        (
            ["run", "--shares", "fast", "train.py"],
            "--shares fast can't be read: say auto, or one number per worker, such as 2,1",
        ),
        (
            ["run", "--shares", "1,-2", "train.py"],
            "--shares 1,-2: each is a number, zero or more, and at least one is above zero",
        ),
        (["run", "--shares", "0,0", "train.py"], "at least one is above zero"),
        (["run", "--shares", "nan", "train.py"], "each is a number, zero or more"),
        (
            ["run", "-n", "2", "--shares", "1,2,3", "train.py"],
            "--shares 1,2,3 has 3 numbers for 2 workers: give one number per worker",
        ),
        (["bench", "training", "--sync", "LocalSGD(0)"], "every=0 is not a number of steps"),
        (["demo", "--workers", "1"], "give 2 or more"),
        (["demo", "--alone", "1"], "give 2 <= alone <= steps"),
        (["bench", "collectives", "--draw", "rnig:5"], "did you mean ring?"),
        (["bench", "pipeline"], "give one, as in --draw 1f1b:4x8, or give --draw all"),
        (["bench", "pipeline", "--draw", "1f1bb:4x8"], "did you mean 1f1b?"),
        (["bench", "collectives", "--via", "native,rnig"], "--via rnig: possible: direct, "),
        (["bench", "collectives", "--sizes", "4KB,4XB"], "--sizes 4XB: give a whole number"),
        (["run", "--name", "a/b", "train.py"], "a run can't be called 'a/b'"),
        (
            ["probe", "--dtypes", "float32,flaot64"],
            "'flaot64' can't be measured; possible: bfloat16, float16, float32, float64",
        ),
        (["probe", "--out", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["lab", "probe", "unequal", "--dtypes", "int8"], "'int8' can't be measured"),
        (["lab", "probe", "unequl", "--out", "/dev/shm/none.json"], "did you mean unequal?"),
        (["run", "--name", "", "train.py"], "a run can't be called ''"),
        (
            ["report", "a", "b"],
            (
                "several runs are compared on a page: give a file for it, as in paceline report "
                "RUN RUN --html out.html"
            ),
        ),
        (
            ["report", "a", "--html", "missing/out.html"],
            "there is no folder missing; make it first",
        ),
    ],
)
def test_mistakes_end_with_2_and_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    launcher: Launcher,
    words: list[str],
    said: str,
) -> None:
    assert call(monkeypatch, *words) == 2
    written = capsys.readouterr().err
    assert written.startswith("paceline: ") and said in written
    assert "Traceback" not in written and launcher.jobs == []


@pytest.mark.parametrize(
    "words",
    [
        ["run"],
        ["run", "--workers", "two", "train.py"],
        ["run", "--wrong", "train.py"],
        ["bench", "training", "--batch", "0"],
        ["nonsense"],
    ],
)
def test_what_typer_refuses_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, launcher: Launcher, words: list[str]
) -> None:
    assert call(monkeypatch, *words) == 2
    assert launcher.jobs == []


def test_other_errors_of_ours_end_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(job: LaunchRequest, environ: dict[str, str], watcher: object) -> int:
        raise CheckpointError("no checkpoint")

    monkeypatch.setattr(launch, "run_job", fails)
    assert call(monkeypatch, "run", "train.py") == 1
    assert capsys.readouterr().err == "paceline: no checkpoint\n"


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("paceline 0.")


def test_bench_runs_its_scripts(monkeypatch: pytest.MonkeyPatch, launcher: Launcher) -> None:
    assert (
        call(
            monkeypatch,
            "bench",
            "collectives",
            "--workers",
            "3",
            "--sizes",
            "4KB",
            "--via",
            "ring",
            "--seconds",
            "0.1",
        )
        == 0
    )
    assert (
        call(
            monkeypatch,
            "bench",
            "training",
            "--threads",
            "1",
            "--model",
            "medium",
            "--batch",
            "2",
            "--steps",
            "5",
            "--sync",
            "AllReduce()",
        )
        == 0
    )
    one, other = launcher.jobs
    assert one.script.endswith("collectives.py") and other.script.endswith("training.py")
    # the run folder is gone
    assert all(
        Path(job.script).is_file() and not Path(job.args[-1]).exists() for job in launcher.jobs
    )
    assert list(one.args[:-1]) == [
        "--sizes",
        "4KB",
        "--via",
        "ring",
        "--seconds",
        "0.1",
        "--folder",
    ]
    assert list(other.args[:-1]) == [
        "--model",
        "medium",
        "--batch",
        "2",
        "--steps",
        "5",
        "--folder",
    ]
    assert (one.workers, other.workers, other.threads) == (3, 2, 1)
    assert other.sync == "AllReduce()"


def test_probe_takes_the_options_of_the_launcher(
    monkeypatch: pytest.MonkeyPatch, launcher: Launcher, tmp_path: Path
) -> None:
    words = (
        "--workers 3 --hosts 2 --join a:29400 --host-rank 1 --secret-file s --threads 1 "
        "--interface eth1 --placement round-robin"
    )
    assert (
        call(
            monkeypatch,
            "probe",
            *words.split(),
            "--dtypes",
            "float64",
            "--out",
            str(tmp_path / "x.json"),
        )
        == 0
    )
    [job] = launcher.jobs
    assert (job.workers, job.hosts, job.join, job.host_rank, job.secret_file) == (
        3,
        2,
        "a:29400",
        1,
        Path("s"),
    )
    assert (job.threads, job.placement, job.bare) == (1, "round-robin", True) and launcher.environs[
        0
    ]["PACELINE_INTERFACE"] == "eth1"
    assert job.script.endswith("bench/probe.py") and job.args[:4] == (
        "--dtypes",
        "float64",
        "--out",
        str(tmp_path / "x.json"),
    )


@pytest.mark.jobs
def test_a_real_command() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "paceline.cli", "run", "nowhere.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        answer.returncode == 2
        and "nowhere.py" in answer.stderr
        and "Traceback" not in answer.stderr
    )


def test_commands_are_listed_by_need() -> None:
    listed = list(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]
    assert listed == list(cli.COMMAND_ORDER) and listed.index("run") < listed.index("bench")


def test_a_shell_completes_commands_and_options() -> None:
    asked = {
        "_PACELINE_COMPLETE": "complete_bash",
        "COMP_WORDS": "paceline run --wor",
        "COMP_CWORD": "2",
    }
    answer = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.argv = ['paceline']; import paceline.cli as c; c.main()",
        ],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.stdout.split() == ["--workers"], answer.stderr
