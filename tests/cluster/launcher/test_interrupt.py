"""Ctrl-C at a terminal, which goes to the launcher's process group: one line says what has
ended, and no worker repeats it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.cluster.launcher.interrupt import JobEnd
from tests.harness import short_timings
from tests.harness.jobs import PLAIN, PRELOADED, Ended, Job, Jobs, wait_for

READY = """
import os, pathlib, signal, sys, time
rank = int(os.environ["RANK"])
def ready():
    pathlib.Path(f"ready{rank}").touch()
    time.sleep(600)
"""
UNHURRIED = short_timings.environ(supervisor=short_timings.UNHURRIED)


def start(job: Jobs, body: str, *, launcher: Sequence[str] = PLAIN, **environ: str) -> Job:
    """Start two workers with a launcher in a process group of its own, as a shell does, and wait
    until both are ready.
    """
    (job.folder / "script.py").write_text(READY + body)
    signs = [job.folder / f"ready{rank}" for rank in range(2)]
    for sign in signs:
        sign.unlink(missing_ok=True)
    started = job.start(
        [sys.executable, *launcher, "run", "--workers", "2", "script.py"], group=0, **environ
    )
    wait_for(lambda: started.process.poll() is not None or all(sign.exists() for sign in signs))
    return started


def interrupt(started: Job, number: int = signal.SIGINT) -> Ended:
    """Send a signal as a terminal does."""
    os.killpg(started.process.pid, number)
    return started.end()


@pytest.mark.alike(2)
@pytest.mark.parametrize(
    ("number", "asked"),
    [
        (signal.SIGINT, "interrupted"),
        (signal.SIGTERM, "asked to end by SIGTERM"),
        (signal.SIGHUP, "asked to end by SIGHUP"),
    ],
)
def test_one_line_says_it(job: Jobs, number: int, asked: str) -> None:
    ended = interrupt(start(job, "ready()", **UNHURRIED), number)
    assert (ended.code, ended.out) == (128 + number, "")
    assert ended.err.splitlines() == [
        "paceline: starting 2 workers of script.py",
        f"paceline: {asked}: 2 workers ended",
    ]


FAILING = """
try:
    ready()
except KeyboardInterrupt:
    print("cleans up", file=sys.stderr)
    if rank == 1:
        raise ValueError("half written")
    raise
"""


def test_what_a_script_raises_itself_is_shown(job: Jobs) -> None:
    ended = interrupt(start(job, FAILING, **UNHURRIED))
    lines = ended.err.splitlines()
    assert ended.code == 130 and lines[-1] == "paceline: interrupted: 2 workers ended"
    assert [line for line in lines if line.startswith("[0]")] == ["[0] cleans up"]
    raised = [line for line in lines if line.startswith("[1]")]
    assert (
        raised[0] == "[1] cleans up"
        and "[1] KeyboardInterrupt" in raised
        and raised[-1] == "[1] ValueError: half written"
    )


def test_those_that_had_to_be_killed_are_counted(job: Jobs) -> None:
    stubborn = (
        "for number in (signal.SIGINT, signal.SIGTERM) * (rank == 1): "
        "signal.signal(number, signal.SIG_IGN)\nready()"
    )
    # more where a busy machine gave rank 0 no time to end by itself
    for seconds in (0.4, 4.0, 40.0):
        timings = short_timings.environ(supervisor={"asked_term": 0.2, "asked_kill": seconds})
        said = interrupt(start(job, stubborn, **timings)).err
        if "2 by" not in said:
            break
    assert said.splitlines()[1:] == ["paceline: interrupted: 2 workers ended (1 by SIGKILL)"]


TRAINING = """
import paceline as pl
from torch import nn
import torch
with pl.start(folder="runs", name="circle") as run:
    model = run.prepare(nn.Linear(4, 1))
    if {saves}:
        run.save()
    ready()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saves", "sequel"),
    [
        (True, ', and run.resume("runs/circle") goes on from its newest checkpoint'),
        (False, ", without a checkpoint"),
    ],
)
def test_the_folder_of_the_run_and_how_to_go_on(job: Jobs, saves: bool, sequel: str) -> None:
    ended = interrupt(start(job, TRAINING.format(saves=saves), launcher=PRELOADED, **UNHURRIED))
    assert (
        ended.code == 130
        and ended.last
        == f"paceline: interrupted: 2 workers ended; the run is in runs/circle{sequel}"
    )
    assert "Traceback" not in ended.err and "KeyboardInterrupt" not in ended.err


FAILING_RUN = """
import paceline as pl
from torch import nn
import os, signal, torch
with pl.start(folder="runs", name="circle") as run:
    model = run.prepare(nn.Linear(4, 1))
    run.save()
    if run.rank == {rank}:
        {fails}
    run.group.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "fails", "why"),
    [
        (0, "os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        (1, "os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        (1, "raise ValueError('no')", "ValueError: no"),
    ],
)
def test_a_failure_says_where_the_run_is_and_leaves_there_why(
    job: Jobs, rank: int, fails: str, why: str
) -> None:
    (job.folder / "script.py").write_text(FAILING_RUN.format(rank=rank, fails=fails))
    ended = job.start([sys.executable, *PRELOADED, "run", "--workers", "2", "script.py"]).end()
    killed = "SIGKILL" in why
    assert 'run.resume("runs/circle") goes on from its newest checkpoint' in ended.last, ended.err
    assert ("--restarts" in ended.last and "--min-workers" in ended.last) == killed, ended.last
    assert (
        killed or sum(line.startswith("[1] Traceback") for line in ended.err.splitlines()) == 1
    ), ended.err
    live = json.loads((job.folder / "runs" / "circle" / "live.json").read_text())["live"]
    assert (
        live["state"] == "failed"
        and live["why"].startswith(f"rank {rank} on ")
        and why in live["why"]
    )
    assert live["script"] == "script.py"


def test_before_workers_have_started() -> None:
    asked = JobEnd([])
    assert asked.last_line is None
    asked.note_signal(signal.SIGINT)
    assert asked.last_line == "paceline: interrupted before its workers started"


def test_nobody_is_told_where_nobody_reads() -> None:
    asked = JobEnd([])
    asked.note_folder(Path("runs"))
    asked.note_signal(signal.SIGPIPE)
    assert asked.last_line is None
