"""What faults do, seen from outside: on real hosts, by looking at their processes, their interfaces
and the time they get.

The scripts don't need torch: they do to their progress page what a loader does.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import lab
from paceline.cluster import machine
from paceline.cluster.control import progress
from paceline.cluster.control.progress import ProgressPage
from paceline.cluster.launcher import janitor
from paceline.errors import DeadlineExceeded, UsageError
from paceline.lab import injector
from paceline.lab import running as lab_running
from paceline.lab.running import Outcome
from tests.harness import short_timings
from tests.harness.clocks import Clock
from tests.harness.jobs import PATIENCE, PRELUDE, ROOT, wait_for

MEGA = 10**6
QUIET = 0.05  # Mbit/s: bridges have a word with each other now and then

# `step()` says when a step begins; `others` are the addresses of all hosts.
BEGINNING = """
import os, socket, sys, time
from pathlib import Path
from paceline.cluster.control.progress import ProgressPage
rank, page, taken = int(os.environ["RANK"]), ProgressPage(Path(os.environ["PACELINE_PROGRESS_PAGE"]), deadline=60), 0
def step():
    global taken
    page.write_step(taken)
    page.reach_step(taken)
    print("step", taken, time.monotonic(), flush=True)
    taken += 1
def goes_on():
    return not Path(sys.argv[1]).exists()
"""  # noqa: E501
STEPS = "for _ in range(20):\n    step()\n    time.sleep(0.02)\npage.write_step(taken)\n"
# rank 1 works as much as it may; rank 0 waits
SPIN = """
while goes_on():
    step()
    end = time.monotonic() + 0.02
    while time.monotonic() < end:
        if rank == 0:
            time.sleep(0.02)
"""
# packets from rank 0 to rank 1 and back, `mega` million bits a second if the link takes them; steps
# begin when the test lets them
TALK = """
let, mega = Path(sys.argv[2]), float(sys.argv[3])
mine = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
mine.bind(("", 9999))
mine.setblocking(False)
began, sent = time.monotonic(), 0
while goes_on():
    while taken < let.stat().st_size:
        step()
    try:
        mine.sendto(bytes(1200), (f"10.77.0.{2 - rank}", 9999))
    except OSError:
        pass  # the network is down, or the queue full
    sent += 1
    time.sleep(max(0.0, began + sent * 1228 * 8 / (mega * 1e6) - time.monotonic()))
"""


pytestmark = [pytest.mark.usefixtures("clean")]


class Watched:
    """A run in a lab, in another thread, and what can be seen of it."""

    def __init__(self, cluster: lab.Cluster, run: Future[Outcome], done: Path, steps: Path) -> None:
        self.cluster, self._run, self._done, self._steps = cluster, run, done, steps

    def page(self, rank: int) -> ProgressPage:
        file = progress.page_path(self.cluster.pages(1), rank)
        wait_for(lambda: self._run.done() or (file.exists() and ProgressPage(file).pid > 0))
        assert file.exists(), self._run.result().output
        return ProgressPage(file)

    def let(self, step: int) -> None:
        """Let scripts that talk begin steps up to this one, and wait until both have come to it."""
        self._steps.write_bytes(bytes(step + 1))
        for rank in range(2):
            self.reached(rank, step)

    def reached(self, rank: int, step: int) -> ProgressPage:
        page = self.page(rank)
        wait_for(lambda: page.step >= step or self._run.done())
        return page

    def end(self) -> Outcome:
        """Let the scripts end that look for it, and wait for the run."""
        self._done.touch()
        return self._run.result(timeout=PATIENCE)


@contextmanager
def running(
    folder: Path,
    body: str,
    faults: Any,
    *args: str,
    environ: dict[str, str] | None = None,
    deadline: float = 60,
    **options: Any,
) -> Iterator[Watched]:
    done, let = folder / "done", folder / "let"
    let.write_bytes(b"")
    given = {"faults": faults, "folder": folder, "deadline": deadline, "environ": environ or {}}
    (folder / "script.py").write_text(BEGINNING + body)
    with lab.cluster(**options) as cluster, ThreadPoolExecutor(1) as thread:
        run = thread.submit(cluster.run, folder / "script.py", str(done), str(let), *args, **given)
        try:
            yield Watched(cluster, run, done, let)
        finally:
            done.touch()
            run.exception(timeout=PATIENCE)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of injectors, which stands until a test moves it."""
    clock = Clock()
    monkeypatch.setattr(injector, "time", SimpleNamespace(monotonic=clock, time=clock))
    return clock


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def counters(pid: int) -> tuple[int, int]:
    """The bytes that the host of this process has received and sent through its interface."""
    line = next(
        line
        for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines()
        if line.strip().startswith("eth0:")
    )
    fields = line.partition(":")[2].split()
    return int(fields[0]), int(fields[8])


def rates(pid: int, seconds: float = 0.5) -> tuple[float, float]:
    """What it receives and sends, in Mbit/s."""
    before, began = counters(pid), time.monotonic()
    time.sleep(seconds)
    after, spent = counters(pid), time.monotonic() - began
    received, sent = ((b - a) * 8 / spent / MEGA for a, b in zip(before, after, strict=True))
    return received, sent


def share(pid: int, seconds: float = 1.0) -> float:
    """The part of one core that a process gets: at most, where the one that measures has to wait
    for a core.
    """
    began, before = time.monotonic(), cpu_seconds(pid)
    time.sleep(seconds)
    return (cpu_seconds(pid) - before) / (time.monotonic() - began)


def steps(outcome: Outcome, rank: int) -> dict[int, float]:
    """When each step of a rank began."""
    return {
        int(number): float(when)
        for number, when in re.findall(rf"\[host\d+ {rank}\] step (\d+) (\S+)", outcome.output)
    }


def events(outcome: Outcome) -> list[tuple[str, str]]:
    return [(event["event"], event["what"]) for event in outcome.events]


def test_kill(tmp_path: Path) -> None:
    with running(tmp_path, STEPS, lab.kill(rank=1, step=5), hosts=2) as run:
        outcome = run.end()
    assert outcome.code == 128 + signal.SIGKILL
    assert list(steps(outcome, 1)) == [0, 1, 2, 3, 4]
    assert "rank 1 on host1 was killed by SIGKILL" in outcome.output.splitlines()[-1]
    assert events(outcome) == [("fault", "kill(rank=1, step=5)")]


@pytest.mark.slow
def test_stop(tmp_path: Path, clock: Clock) -> None:
    with running(tmp_path, STEPS, "stop(rank=1, step=5, seconds=1.5)", hosts=2) as run:
        page = run.page(1)
        # nothing else is to come
        wait_for(lambda: janitor.read_state(page.pid) == "T" and page._cells[progress._HOLD] == 0)
        assert janitor.read_state(run.page(0).pid) != "T"
        assert page.step == 5
        stopped = time.monotonic()
        clock.now += 1.5
        wait_for(lambda: janitor.read_state(page.pid) != "T")
        outcome = run.end()
    assert outcome.code == 0, outcome.output
    began = steps(outcome, 1)
    assert len(began) == 20 and began[5] > stopped
    assert events(outcome) == [
        ("fault", "stop(rank=1, step=5, seconds=1.5)"),
        ("fault over", "stop(rank=1, step=5, seconds=1.5)"),
    ]
    assert (
        "paceline: fault: stop(rank=1, step=5, seconds=1.5): done before step 5" in outcome.output
    )


@pytest.mark.slow
def test_cut(tmp_path: Path, clock: Clock) -> None:
    with running(tmp_path, TALK, lab.cut(host=1, seconds=3, step=3), "5", hosts=2) as run:
        pids = [run.page(rank).pid for rank in range(2)]
        run.let(2)
        wait_for(lambda: counters(pids[1])[0] > 50_000)
        run.let(3)
        # nothing comes in, and nothing gets out
        wait_for(lambda: rates(pids[1], 0.3)[0] < QUIET and rates(pids[0], 0.3)[0] < QUIET)
        clock.now += 3
        wait_for(lambda: rates(pids[1], 0.3)[0] > 1 and rates(pids[0], 0.3)[0] > 1)
        outcome = run.end()
    assert outcome.code == 0, outcome.output
    assert events(outcome) == [
        ("fault", "cut(host=1, seconds=3, step=3)"),
        ("fault over", "cut(host=1, seconds=3, step=3)"),
    ]
    assert outcome.events[1]["time"] - outcome.events[0]["time"] == 3


@pytest.mark.slow
def test_link(tmp_path: Path, clock: Clock) -> None:
    faults = (
        "[link(host=1, bandwidth='5mbit', step=2), link(host=1, up='2mbit', step=4, seconds=5)]"
    )
    with running(tmp_path, TALK, faults, "30", hosts=2, bandwidth="20mbit") as run:
        pid = run.page(1).pid
        wait_for(lambda: near(rates(pid), (20, 20)))
        run.let(2)
        wait_for(lambda: near(rates(pid), (5, 5)))
        run.let(4)
        wait_for(lambda: near(rates(pid), (5, 2)))
        clock.now += 5
        wait_for(lambda: near(rates(pid), (5, 5)))  # the first one still holds
        outcome = run.end()
    assert [event for event, _ in events(outcome)] == ["fault", "fault", "fault over"]


def near(found: tuple[float, float], wanted: tuple[float, float]) -> bool:
    return all(0.85 * b < a < 1.15 * b for a, b in zip(found, wanted, strict=True))


@pytest.mark.slow
@pytest.mark.usefixtures("quotas")
def test_slow(tmp_path: Path, clock: Clock) -> None:
    with running(
        tmp_path, SPIN, "slow(host=1, factor=0.25, step=50, seconds=5)", hosts=2, processors=0.6
    ) as run:
        page = run.reached(1, 5)
        assert share(page.pid) < 0.7
        run.reached(1, 51)
        assert run.cluster.quota_of(1) == pytest.approx(0.15)
        assert run.cluster.quota_of(0) == pytest.approx(0.6)
        assert share(page.pid) < 0.22
        clock.now += 5
        wait_for(lambda: run.cluster.quota_of(1) == pytest.approx(0.6))
        # whatever it gets: others use these cores, too
        assert machine.read_cpu_quota(Path(f"/proc/{page.pid}/cgroup")) == pytest.approx(0.6)
        outcome = run.end()
    assert [event for event, _ in events(outcome)] == ["fault", "fault over"]


@pytest.mark.slow
@pytest.mark.usefixtures("quotas")
def test_slow_without_a_quota_counts_threads(tmp_path: Path) -> None:
    with running(
        tmp_path,
        SPIN,
        "slow(host=1, factor=0.2, step=5)",
        hosts=2,
        environ={"OMP_NUM_THREADS": "1"},
    ) as run:
        page = run.reached(1, 6)
        assert run.cluster.quota_of(1) == pytest.approx(0.2)
        assert share(page.pid) < 0.28
        run.end()
        assert run.cluster.quota_of(1) is None  # as described, for the next run


def test_crash_of_the_only_host(tmp_path: Path) -> None:
    with running(tmp_path, STEPS, "crash(host=0, step=5)", hosts=1, workers=2) as run:
        outcome = run.end()
        assert run.cluster.processes(0) == []
    assert outcome.code == 128 + signal.SIGKILL
    assert list(steps(outcome, 0)) == [0, 1, 2, 3, 4]
    assert events(outcome) == [("fault", "crash(host=0, step=5)")]


@pytest.mark.slow
@pytest.mark.parametrize("waits", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """The launcher of the other host hears nothing more, and gives up after 15 s, unless the
    deadline of the run comes first.
    """
    environ = short_timings.environ(rendezvous={"silence": 1000} if waits else {})
    with running(
        tmp_path, TALK, lab.crash(host=1, step=3), "5", environ=environ, deadline=PATIENCE, hosts=2
    ) as run:
        pids = [run.page(rank).pid for rank in range(2)]
        run.let(3)
        wait_for(lambda: run.cluster.processes(1) == [])
        # whether it is buried is for the machine's init to say, and how soon it is dead for its
        # processors
        wait_for(lambda: janitor.read_state(pids[1]) in {"", "Z"})
        assert rates(pids[0], 0.5)[0] < QUIET
        assert len(run.cluster.processes(0)) >= 2  # it goes on
        if waits:
            monkeypatch.setattr(
                lab_running, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + PATIENCE)
            )
            with pytest.raises(DeadlineExceeded, match=r"still running on host0\. "):
                run.end()
        else:
            outcome = run.end()
            assert outcome.code != 0 and "host1" in outcome.output.splitlines()[-1]


@pytest.mark.slow
def test_join(tmp_path: Path) -> None:
    """A job of a fixed size takes nobody in, and the launcher that came too late says so."""
    with running(
        tmp_path,
        STEPS.replace("0.02", "0.1"),
        "join(host=1, step=5)",
        hosts=2,
        environ={"PACELINE_DEADLINE": "3"},
    ) as run:
        run.reached(0, 1)
        assert run.cluster.processes(1) == []
        outcome = run.end()
    assert len(steps(outcome, 0)) == 20
    assert outcome.code == 2 and re.search(
        r"\[host1\] paceline: the meeting point \S+ could not be reached", outcome.output
    )
    assert events(outcome) == [("fault", "join(host=1, step=5)")]


TRAIN = (
    PRELUDE
    + """
with pl.start(folder="runs") as run:
    model, optimizer, loader = parts(run, samples=160)
    for x, y in loader:
        step(run, model, optimizer, x, y)
"""
)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_training_run_has_its_faults_among_its_events(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    script = tmp_path / "train.py"
    faults = (
        "[stop(rank=1, step=3, seconds=0.5), cut(host=1, seconds=0.5, step=6), "
        "kill(rank=0, step=500)]"
    )
    with lab.cluster(hosts=2) as cluster:
        began = time.monotonic()
        outcome = cluster.run(script, faults=faults, folder=tmp_path, deadline=100)
        seconds = time.monotonic() - began
        assert outcome.code == 0 and outcome.folder is not None, outcome.output
        summary = json.loads((outcome.folder / "summary.json").read_text())
        assert summary["steps"] == 20
        assert summary["events"] == list(outcome.events)
        assert [event["event"] for event in summary["events"]] == [
            "fault",
            "fault over",
            "fault",
            "fault over",
            "fault not carried out",
        ]
        assert [event["step"] for event in summary["events"]] == [3, 3, 6, 6, 20]
        # the last one when all processes had ended
        assert 0 < summary["events"][0]["time"] < summary["events"][-1]["time"] < seconds
        assert (
            "not carried out: kill(rank=0, step=500): the run ended after 20 steps"
            in outcome.output
        )
        # the same cluster once more
        broken = cluster.run(script, faults="kill(rank=1, step=5)", folder=tmp_path, deadline=100)
    assert broken.code == 128 + signal.SIGKILL and broken.folder is not None
    assert not (broken.folder / "summary.json").exists()
    noted = json.loads((broken.folder / "events.json").read_text())
    assert noted == list(broken.events) and noted[0]["what"] == "kill(rank=1, step=5)"
    assert len((broken.folder / "metrics.jsonl").read_text().splitlines()) <= 5  # no step after it


def command(folder: Path, *faults: str) -> subprocess.CompletedProcess[str]:
    """`paceline lab run` with these faults, as a user types it."""
    (folder / "script.py").write_text(BEGINNING + STEPS)
    options = [word for fault in faults for word in ("--fault", fault)]
    line = [
        sys.executable,
        "-m",
        "paceline",
        "lab",
        "run",
        *options,
        "two-hosts",
        "script.py",
        "done",
    ]
    return subprocess.run(
        line,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.mark.slow
def test_the_command_takes_faults(tmp_path: Path) -> None:
    ended = command(
        tmp_path,
        "[stop(rank=0, step=2, seconds=0.1), cut(host=0, seconds=0.1)]",
        "kill(rank=3, step=4)",
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 128 + signal.SIGKILL, said
    done = re.findall(r"paceline: fault: (\w+)\(.*done before step (\d)", said)
    # a stop is said when it is over: on a busy machine late
    assert sorted(done) == [("cut", "0"), ("kill", "4"), ("stop", "2")], said


def test_the_command_finds_a_wrong_fault_at_once(tmp_path: Path) -> None:
    ended = command(tmp_path, "kil(rank=1, step=2)")
    assert ended.returncode == 2 and ended.stdout == ""
    assert (
        ended.stderr.startswith("paceline: the fault 'kil(rank=1, step=2)'")
        and "did you mean kill?" in ended.stderr
    )
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "fault", ["kil(rank=1, step=2)", "kill(rank=7, step=2)", "cut(host=1, seconds=1)"]
)
def test_a_wrong_fault_is_found_before_anything_runs(tmp_path: Path, fault: str) -> None:
    (tmp_path / "script.py").write_text("open('started', 'w')\n")
    with (
        lab.cluster(hosts=1) as cluster,
        pytest.raises(UsageError, match=re.escape(fault.partition(",")[0])),
    ):
        cluster.run(tmp_path / "script.py", faults=fault, folder=tmp_path)
    assert not (tmp_path / "started").exists()


def test_a_run_without_faults_has_no_injector(tmp_path: Path) -> None:
    with running(tmp_path, STEPS, (), hosts=1) as run:
        run.page(0)
        names = {thread.name for thread in threading.enumerate()}
        outcome = run.end()
    assert not any("chaos" in name for name in names)
    assert outcome.events == () and len(steps(outcome, 0)) == 20
