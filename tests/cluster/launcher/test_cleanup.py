"""What a launcher notes of its workers' processes, and removes at the end; with the janitor that
stands in for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from paceline.cluster.launcher.cleanup import JobCleanup
from tests.harness.jobs import wait_for

# A worker that forks a child which listens in a temporary folder of its own.
BODY = """
import os, socket, sys, tempfile, time
if os.fork() == 0:
    folder = tempfile.mkdtemp(prefix="pymp-", dir=sys.argv[1])
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(folder + "/listener")
    listening.listen()
time.sleep(60)
"""


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="pl-") as folder:
        yield Path(folder)


@pytest.fixture
def begin(short: Path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Starts a worker of the job with this mark, whose child listens by the time that it is
    given.
    """
    started: list[subprocess.Popen[bytes]] = []

    def make(mark: str) -> subprocess.Popen[bytes]:
        environ = {**os.environ, "PACELINE_JOB": mark}
        started.append(
            subprocess.Popen(
                [sys.executable, "-S", "-c", BODY, str(short)], process_group=0, env=environ
            )
        )
        wait_for(lambda: any(short.glob("pymp-*/listener")))
        return started[-1]

    yield make
    for each in started:
        each.kill()
        each.wait()


def worker(process: subprocess.Popen[bytes]) -> Any:
    return SimpleNamespace(process=process, ended_at=None)


def janitors(mark: str) -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if mark in child.cmdline()]


def test_what_is_left_is_ended_and_removed(
    begin: Callable[[str], subprocess.Popen[bytes]], short: Path
) -> None:
    cleanup = JobCleanup("cleanup1" * 4)
    cleanup.start_janitor()
    process = begin("cleanup1" * 4)
    cleanup.add_group(process.pid)
    cleanup.sweep_job([process])
    assert process.returncode == -9 and not list(short.iterdir())
    cleanup.end_janitor()
    assert janitors("cleanup1" * 4) == []


def test_the_folders_of_children_that_died_before_are_removed(
    begin: Callable[[str], subprocess.Popen[bytes]], short: Path
) -> None:
    """They were noted while the children lived."""
    cleanup = JobCleanup("cleanup2" * 4)
    cleanup.start_janitor()
    process = begin("cleanup2" * 4)
    cleanup.add_group(process.pid)
    cleanup.collect_litter([worker(process)])
    (child,) = psutil.Process(process.pid).children()
    child.kill()
    wait_for(lambda: child.status() == psutil.STATUS_ZOMBIE)
    assert list(short.iterdir())
    cleanup.end_group(process.pid)
    cleanup.drop_group(process.pid)
    process.wait()
    cleanup.sweep_job([])
    cleanup.end_janitor()
    assert not list(short.iterdir())


def test_a_janitor_that_was_killed_is_not_missed(
    begin: Callable[[str], subprocess.Popen[bytes]], short: Path
) -> None:
    cleanup = JobCleanup("cleanup3" * 4)
    cleanup.start_janitor()
    # Popen returns as soon as the child has left our memory, a moment before its command line shows
    wait_for(lambda: len(janitors("cleanup3" * 4)) == 1)
    (deputy,) = janitors("cleanup3" * 4)
    deputy.kill()
    wait_for(lambda: deputy.status() == psutil.STATUS_ZOMBIE)
    process = begin("cleanup3" * 4)
    cleanup.add_group(process.pid)
    cleanup.sweep_job([process])
    cleanup.end_janitor()
    assert process.returncode == -9 and not list(short.iterdir())
