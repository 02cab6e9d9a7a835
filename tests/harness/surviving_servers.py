"""Runs whose servers are killed, and what came of them."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import psutil

from tests.harness.jobs import Job, Jobs, wait_for
from tests.harness.survivors import Outcome, check, gap, outcome, pause, script, trains, until


def servers(job: Job) -> list[psutil.Process]:
    """Those of a job, the eldest first."""
    processes = []
    for process in job.processes():
        with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
            processes += [process] if "paceline.servers.process.main" in process.cmdline() else []
    return sorted(processes, key=lambda process: process.create_time())


def ended(job: Jobs, launched: Job) -> Outcome:
    end = launched.end()
    assert end.code == 0, end.err
    return outcome(job.folder / "killed", job.folder / "killed")


def until_told(launched: Job, path: Path, told: str) -> None:
    """Wait until the first worker has so many servers and events."""
    wait_for(
        lambda: launched.process.poll() is not None or (path.exists() and path.read_text() == told)
    )


def kill_primaries(job: Jobs, seed: int, wanted: Outcome, *options: str, **parts: object) -> None:
    """At random moments of a training that never rests; the lost ones are made anew, and killed
    again. `parts`: "after" tells.
    """
    chance, out = random.Random(seed), job.folder / f"killed{seed}"
    out.mkdir()
    text = script(
        start=f"name='run', folder='{out.name}/runs'", epochs=20, nap=until(2, 0.04), **parts
    )
    launched = job.run(text, 3, *options, OUT=str(out))
    trains(launched, out, 3)
    for count, most in ((0, 0.5), (1, 1.5)):
        # or the only one that has a shard might be killed
        until_told(launched, out / "c", f"4 {count}")
        pause(chance, most)
        servers(launched)[chance.randrange(2)].kill()  # the eldest two are primaries
    end = launched.end()
    assert end.code == 0, (seed, end.err)
    check(outcome(out, out), wanted)
    assert gap(out) < 60, (seed, gap(out))
