"""The deputy of a launcher: what it removes of shared memory, and what it leaves alone."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.cluster import guard

SEMAPHORES = "sem.s5Ipxm", "sem.mp-_moapdfg"


@pytest.fixture
def make(tmp_path, monkeypatch) -> Iterator[Callable[[str], Path]]:
    """Makes files in a folder that stands for shared memory."""
    monkeypatch.setattr(guard, "_SHARED", tmp_path)

    def write(name: str) -> Path:
        (tmp_path / name).write_bytes(bytes(32))
        return tmp_path / name

    return write


@pytest.fixture
def dead() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


class TestReclaim:
    def test_what_the_killed_left(self, make, dead):
        left = [make(f"torch_{dead}_123_4"), make("sem.s5Ipxm"), make("sem.mp-_moapdfg")]
        guard.reclaim({dead}, time.time() - 60)
        assert not any(path.exists() for path in left)

    def test_what_others_have(self, make, dead):
        kept = [make(f"torch_{dead + 1}_123_4"), make("sem.loky-12-abcdefgh"), make("sem.long"), make("torch_x"), make("other")]
        guard.reclaim({dead}, time.time() - 60)
        assert all(path.exists() for path in kept)

    def test_what_the_living_have(self, make):
        path = make(f"torch_{os.getpid()}_1_1")
        guard.reclaim({os.getpid()}, 0)
        assert path.exists()

    @pytest.mark.parametrize("name", SEMAPHORES)
    def test_what_was_there_before(self, make, dead, name):
        path = make(name)
        guard.reclaim({dead}, time.time() + 60)
        assert path.exists()

    @pytest.mark.parametrize("name", SEMAPHORES)
    def test_what_is_open_or_mapped(self, make, dead, name):
        path = make(name)
        with path.open("r+b") as file:
            guard.reclaim({dead}, 0)
            assert path.exists()
            mapped = mmap.mmap(file.fileno(), 32)
        guard.reclaim({dead}, 0)
        assert path.exists()
        mapped.close()
        guard.reclaim({dead}, 0)
        assert not path.exists()


def test_a_killed_launcher_leaves_its_deputy_to_end_the_rest(tmp_path):
    """The deputy alone: its input ends without `done`."""
    job = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], process_group=0, env={"PACELINE_JOB": "abc"})
    deputy = subprocess.Popen([sys.executable, "-I", "-S", guard.__file__, "abc"], stdin=subprocess.PIPE)
    assert deputy.stdin is not None
    deputy.stdin.write(b"+%d\n" % job.pid)
    deputy.stdin.flush()
    time.sleep(0.1)
    assert job.poll() is None
    deputy.stdin.close()
    assert deputy.wait(5) == 0 and job.wait(5) == -9


def test_who_is_ended_is_told():
    """Also who carries the mark and was never seen before: what it leaves in shared memory is known by its number."""
    group, other = (
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], process_group=0, env={"PACELINE_JOB": mark})
        for mark in ("none", "abe")
    )
    assert guard.sweep("abe", [group.pid]) == {group.pid, other.pid}
    assert group.wait(5) == other.wait(5) == -9


@pytest.mark.parametrize("grouped", [True, False])
def test_who_was_ended_does_nothing_any_more(grouped):
    """A killed process has no environment long before it has ended: it may have just made what is looked for next."""
    body = "import mmap, time; m = mmap.mmap(-1, 1 << 29, mmap.MAP_PRIVATE | mmap.MAP_POPULATE); print(flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", body], process_group=0, env={"PACELINE_JOB": "abf"}, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline()
        guard.sweep("abf", [process.pid] if grouped else [])
        assert process.poll() == -9


def test_a_deputy_that_is_told_so_does_nothing():
    job = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], process_group=0, env={"PACELINE_JOB": "abd"})
    deputy = subprocess.Popen([sys.executable, "-I", "-S", guard.__file__, "abd"], stdin=subprocess.PIPE)
    deputy.communicate(b"+%d\ndone\n" % job.pid, 5)
    assert job.poll() is None
    job.kill()
    job.wait()


def test_the_folders_of_servers_go_with_their_job(tmp_path, monkeypatch):
    """By name: who started a killed server may have been killed with it. Those of another job stay."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine, other = (Path(tempfile.mkdtemp(prefix=guard.sockets(mark * 16))) for mark in ("ab", "ac"))
    (mine / "server").touch()
    guard.sweep("ab" * 16, [])
    assert not mine.exists() and other.exists()
