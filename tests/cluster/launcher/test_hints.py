"""What launchers say though nothing is wrong: of options behind the script, of too few cores,
and for whom they wait.
"""

from __future__ import annotations

import shlex
import sys
import threading
from dataclasses import fields
from pathlib import Path

import pytest
import typer

from paceline import cli
from paceline.cluster import network
from paceline.cluster.hosts.meeting import Meeting
from paceline.cluster.hosts.rendezvous import Offer, assemble_hosts
from paceline.cluster.launcher import hints
from paceline.cluster.launcher.hints import (
    SEVERAL_WORKERS_OPTIONS,
    WaitReminder,
    hint_crowded_host,
    hint_misplaced_options,
    hint_python_script,
)
from paceline.cluster.launcher.launch import _write_join_command
from paceline.cluster.launcher.request import LaunchRequest, check_request
from paceline.errors import DeadlineExceeded, UsageError
from paceline.timings import RendezvousTimings, Timings

SECRET = b"0123456789abcdef"


class TestMisplaced:
    @pytest.mark.parametrize(
        ("args", "given"),
        [
            (["-n", "2"], "-n 2"),
            (["-n4"], "-n4"),
            (["data", "--workers=3", "-v"], "--workers=3"),
            (["--lr", "0.1", "--hosts", "2"], "--hosts 2"),
            (["--sync", "LocalSGD(every=4)"], "--sync 'LocalSGD(every=4)'"),
            (["--min-workers"], "--min-workers"),
        ],
    )
    def test_is_said_with_the_line_that_is_right(self, tmp_path, args, given):
        script = tmp_path / "x.py"
        script.write_text("print(1)")
        assert hint_misplaced_options(str(script), args) == (
            f"{given} after x.py goes to x.py, which runs on 1 worker; if paceline is meant, put "
            f"it before: paceline run {given} {script}"
        )

    @pytest.mark.parametrize(
        "args",
        [
            [],
            ["-name", "2"],
            ["-nx"],
            ["--workersome"],
            ["--", "-n", "2"],
            ["--name", "x", "--threads", "2"],
            ["n"],
        ],
    )
    def test_what_is_the_scripts(self, tmp_path, args):
        (tmp_path / "x.py").write_text("print(1)")
        assert hint_misplaced_options(str(tmp_path / "x.py"), args) is None

    def test_a_script_that_knows_the_option_itself(self, tmp_path):
        path = tmp_path / "x.py"
        path.write_text("parser.add_argument('-w', \"--workers\", type=int)")
        assert (
            hint_misplaced_options(str(path), ["--workers", "2"]) is None
            and hint_misplaced_options(str(path), ["--hosts", "2"]) is not None
        )

    def test_they_are_options_of_paceline_run(self):
        command = typer.main.get_command(cli.app).commands["run"]  # type: ignore[attr-defined]
        assert {*SEVERAL_WORKERS_OPTIONS} <= {
            word for parameter in command.params for word in parameter.opts
        }


@pytest.mark.parametrize("script", ["python", "python3.11", "venv/bin/python"])
def test_python_in_the_place_of_the_script(script):
    assert hint_python_script(script, ["train.py", "-x"]) == (
        f": paceline starts Python itself, so leave {script} out: paceline run ... train.py -x"
    )
    with pytest.raises(
        UsageError,
        match=rf"the script no/{script} doesn't exist \(looked in .*\): paceline starts Python itself",  # noqa: E501
    ):
        check_request(LaunchRequest(f"no/{script}", ("train.py",)))


@pytest.mark.parametrize(
    ("script", "args"), [("absent.py", ["train.py"]), ("python", []), ("pythonic", ["x.py"])]
)
def test_another_script_that_is_not_there(script, args):
    assert hint_python_script(script, args) == ""


def test_of_a_job_that_runs_on_one_worker(job):
    script = job.write("print('ran', sys.argv[1:])".replace("sys", "__import__('sys')"))
    (job.folder / script).write_text("import sys\nprint('ran', sys.argv[1:])")
    ended = job.start([sys.executable, *job.launcher, "run", script, "-n", "2"]).end()
    assert (ended.code, ended.out) == (0, "[0] ran ['-n', '2']\n")
    assert ended.err.startswith(
        "paceline: -n 2 after script.py goes to script.py, which runs on 1 worker; "
    )
    ended = job.start([sys.executable, *job.launcher, "run", "-n", "2", script, "-n", "2"]).end()
    assert ended.code == 0 and "after script.py" not in ended.err


class TestCrowded:
    @pytest.mark.parametrize(("workers", "cores"), [(1, 1), (2, 2), (2, 8)])
    def test_enough(self, workers, cores):
        assert hint_crowded_host(workers, cores, "a") is None

    def test_too_few(self):
        assert str(hint_crowded_host(2, 1, "a")).startswith(
            "2 workers take turns on the 1 core of a: "
        )
        assert str(hint_crowded_host(9, 8, "b")).startswith(
            "9 workers take turns on the 8 cores of b: "
        )

    def test_said_once_by_the_launchers_of_a_machine(self, script, launch, monkeypatch):
        """Here two, whose workers are together one more than there are cores."""
        from paceline.cluster.machine import count_cores

        with network.open_listener("127.0.0.1") as probe:
            join = f"127.0.0.1:{probe.getsockname()[1]}"
        path, environ = script("print('ran')"), {"PACELINE_SECRET": SECRET.decode()}
        launched = [
            launch(path, workers, hosts=2, join=join, **environ) for workers in (1, count_cores())
        ]
        said = "".join(each.end()[2] for each in launched)
        assert said.count(f"paceline: {count_cores() + 1} workers take turns on the ") == 1, said


class Told:
    """Keeps what is said; `heard` waits for something that has this in it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._changed = threading.Condition()

    def __call__(self, text: str) -> None:
        with self._changed:
            self.lines.append(text)
            self._changed.notify_all()

    def heard(self, part: str) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: any(part in line for line in self.lines), 30), (
                part,
                self.lines,
            )
            return next(line for line in self.lines if part in line)


AT_ONCE = Timings(rendezvous=RendezvousTimings(reminder=0.0))


class TestWaiting:
    def meeting(self, name: str, port: int, told: Told, *, deadline: float = 60.0) -> Meeting:
        offer = Offer(name, 2, "127.0.0.1", "machine", 1000, 2000)
        return Meeting(
            ("127.0.0.1", port),
            SECRET,
            offer,
            3,
            None,
            deadline,
            f"paceline run {name}.py",
            told,
            AT_ONCE,
        )

    def test_each_says_for_whom_and_how_to_start_it(self):
        with network.open_listener("127.0.0.1") as probe:
            port = int(probe.getsockname()[1])
        told = [Told() for _ in range(3)]
        found: list[object] = [None] * 3

        def come(number: int) -> None:
            found[number] = assemble_hosts(self.meeting("abc"[number], port, told[number]))

        threads = [threading.Thread(target=come, args=(number,)) for number in range(3)]
        threads[0].start()
        line = told[0].heard("waits at")
        assert line.startswith(f"waits at 127.0.0.1:{port} for 2 hosts more, ") and line.endswith(
            "(here: a); there, run: paceline run a.py"
        )
        threads[1].start()
        assert (
            told[1].heard("has come")
            == f"has come to 127.0.0.1:{port}, and waits there for the other hosts"
        )
        threads[2].start()
        for thread in threads:
            thread.join()
        for council in found:
            council.close()  # type: ignore[attr-defined]

    def test_where_nobody_answers(self, monkeypatch):
        """As from a host that hasn't this address."""
        monkeypatch.setattr(
            "paceline.cluster.hosts.rendezvous._find_own_address", lambda meeting: None
        )
        with network.open_listener("127.0.0.1") as probe:
            port = int(probe.getsockname()[1])
        told = Told()
        with pytest.raises(DeadlineExceeded):
            assemble_hosts(self.meeting("a", port, told, deadline=1.0))
        assert told.lines[0].startswith(
            f"nobody answers at 127.0.0.1:{port} yet (Connection refused); "
        )
        assert told.lines[0].endswith("on the host with that address, run: paceline run a.py")

    def test_now_and_then(self, monkeypatch):
        told, at = Told(), [0.0]
        monkeypatch.setattr(hints.time, "monotonic", lambda: at[0])
        reminder = WaitReminder(told, timings=AT_ONCE.rendezvous)
        for second in range(26):
            at[0] = float(second)
            reminder.remind_if_due(lambda: f"at {at[0]:g}")
        assert told.lines == ["at 0", "at 10", "at 20"]


def test_the_line_for_another_host_starts_the_same_job(monkeypatch):
    """Read as a user would type it there."""
    given = LaunchRequest(
        *("x y.py", ("--lr", "0.1 "), 3, 2, "10.0.0.1:29400", 0, "s.secret"),
        **{
            "sync": "LocalSGD(every=4)",
            "mesh": "data=2, shard=3",
            "cut": "shard('blocks.*')",
            "backend": "paceline",
            "servers": 2,
            "straggler": "drop",
            "cluster": Path("links.toml"),
            "report_to": "tensorboard,wandb",
            "shares": "2,1",
            "horovod": True,
        },
        **{"placement": "round-robin", "min_workers": 2},
        **{"saves_on_term": False, "grace_seconds": 5.0, "resumes": True},
    )
    may_differ = {
        "host_rank",
        "threads",
        "deadline",
        "name",
        "restarts",
        "patience",
        "progress",
        "bare",
        "call",
        "plan",  # its workers, strategy and shares stand in the line
    }
    same = {
        field.name for field in fields(LaunchRequest) if getattr(given, field.name) == field.default
    }
    assert same == may_differ - {"host_rank"}, (
        "an option that hosts have to have alike is not tried here"
    )
    asked: list[LaunchRequest] = []
    monkeypatch.setattr(
        "paceline.cli.launch.run_job", lambda job, environ, watcher: asked.append(job) or 0
    )
    monkeypatch.setattr(sys, "argv", shlex.split(_write_join_command(given)))
    with pytest.raises(SystemExit):
        cli.main()
    assert asked[0] == LaunchRequest(
        **{**vars(given), "host_rank": None, "secret_file": asked[0].secret_file}
    )
    assert str(asked[0].secret_file) == "s.secret"


def test_the_line_for_another_host_says_how_often_a_whole_job_starts_again():
    whole, single = (
        LaunchRequest("x.py", hosts=2, join="a:1", restarts=3, min_workers=minimum)
        for minimum in (None, 1)
    )
    assert "--restarts 3" in _write_join_command(whole) and "--restarts" not in _write_join_command(
        single
    )
