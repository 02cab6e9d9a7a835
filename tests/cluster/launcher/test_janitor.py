"""The deputy of a launcher: what it removes of shared memory, and what it leaves alone."""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from paceline.cluster.launcher import janitor
from paceline.timings import DEFAULT_TIMINGS
from tests.harness.jobs import PATIENCE

TIMINGS = json.dumps(asdict(DEFAULT_TIMINGS.janitor))
MARK = "0123abcd" * 4
SEMAPHORES = "sem.s5Ipxm", "sem.mp-_moapdfg", f"sem.mp-{MARK[:8]}-abc_efgh"
SHARED = Path("/dev/shm")
# Makes a semaphore as multiprocessing does, and stops in the middle: before or after it has its
# second name.
MAKER = """
import mmap, os, sys, time
first, second = sys.argv[1:]
file = os.open(first, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
os.write(file, bytes(32))
memory = mmap.mmap(file, 32)
if second:
    os.link(first, second)
    os.unlink(first)
    os.close(file)
print(flush=True)
time.sleep(600)
"""


@pytest.fixture
def shared(monkeypatch) -> Iterator[Path]:
    """A folder that stands for shared memory, and is in it."""
    with tempfile.TemporaryDirectory(
        prefix="test-", dir=SHARED if SHARED.is_dir() else None
    ) as folder:
        monkeypatch.setattr(janitor, "_SHARED_MEMORY_FOLDER", Path(folder))
        yield Path(folder)


@pytest.fixture
def make(shared) -> Callable[[str], Path]:
    """Makes files there."""

    def write(name: str) -> Path:
        (shared / name).write_bytes(bytes(32))
        return Path(shared / name)

    return write


@pytest.fixture
def dead() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


def inodes(*paths: Path) -> set[int]:
    return {path.stat().st_ino for path in paths}


@pytest.mark.jobs
class TestReclaim:
    def test_what_the_killed_left(self, make, dead):
        left = [make(f"torch_{dead}_123_4"), *map(make, SEMAPHORES)]
        janitor.reclaim_leftovers(MARK, {dead}, inodes(*left[1:3]), time.time() - 60, seconds=0.05)
        assert not any(path.exists() for path in left)

    def test_what_nobody_of_the_job_had(self, make, dead):
        """Semaphores of others look like those of the job, also those that nobody has open, or
        only where this process can't see it.
        """
        others = [
            make(name) for name in ("sem.foobar", "sem.mp-abcdefgh", "sem.mp-4567abcd-abcdefgh")
        ]
        janitor.reclaim_leftovers(MARK, {dead}, set(), time.time() - 60, seconds=0.05)
        assert all(path.exists() for path in others)

    def test_both_names_of_one_that_is_being_made(self, make, shared, dead):
        first, second = make("sem.s5Ipxm"), shared / SEMAPHORES[2]
        os.link(first, second)
        janitor.reclaim_leftovers(MARK, {dead}, set(), time.time() - 60, seconds=0.05)
        assert not first.exists() and not second.exists()

    def test_what_others_have(self, make, dead):
        names = (f"torch_{dead + 1}_123_4", "sem.loky-12-abcdefgh", "sem.long", "torch_x", "other")
        kept = [make(name) for name in names]
        janitor.reclaim_leftovers(MARK, {dead}, inodes(*kept), time.time() - 60, seconds=0.05)
        assert all(path.exists() for path in kept)

    def test_what_the_living_have(self, make):
        path = make(f"torch_{os.getpid()}_1_1")
        janitor.reclaim_leftovers(MARK, {os.getpid()}, set(), 0, seconds=0.05)
        assert path.exists()

    @pytest.mark.parametrize("name", [*SEMAPHORES, "torch_{dead}_1_1"])
    def test_what_was_there_before(self, make, dead, name):
        path = make(name.format(dead=dead))
        janitor.reclaim_leftovers(MARK, {dead}, inodes(path), time.time() + 60, seconds=0.05)
        assert path.exists()

    @pytest.mark.parametrize("name", SEMAPHORES)
    def test_what_is_open_or_mapped(self, make, dead, name):
        path = make(name)
        held = inodes(path)
        with path.open("r+b") as file:
            janitor.reclaim_leftovers(MARK, {dead}, held, 0, seconds=0.05)
            assert path.exists()
            mapped = mmap.mmap(file.fileno(), 32)
        janitor.reclaim_leftovers(MARK, {dead}, held, 0, seconds=0.05)
        assert path.exists()
        mapped.close()
        janitor.reclaim_leftovers(MARK, {dead}, held, 0, seconds=0.05)
        assert not path.exists()

    @pytest.mark.parametrize("second", ["", "sem.mp-_moapdfg"])
    def test_one_that_was_being_made_when_its_maker_was_ended(self, make, shared, second):
        """Its maker is stopped, looked at, and killed; what lies beside it is another's."""
        other, began = make("sem.foobar"), time.time()
        names = (str(shared / "sem.s5Ipxm"), str(shared / second) if second else "")
        with subprocess.Popen(
            [sys.executable, "-S", "-c", MAKER, *names], process_group=0, stdout=subprocess.PIPE
        ) as maker:
            assert maker.stdout is not None and maker.stdout.readline()
            held: set[int] = set()
            killed = janitor.end_group(maker.pid, held)
        assert [path.name for path in shared.iterdir() if path != other] == [second or "sem.s5Ipxm"]
        janitor.reclaim_leftovers(MARK, killed, held, began, seconds=0.05)
        assert [*shared.iterdir()] == [other]


@pytest.mark.jobs
def test_semaphores_of_a_branded_process_and_its_children_have_the_mark():
    code = f"""
import multiprocessing, os
from paceline.cluster.launcher.janitor import brand_semaphores
brand_semaphores({MARK!r})
context = multiprocessing.get_context("spawn")  # they keep their names while they live
lock = context.Lock()
print(*[name for name in os.listdir("/dev/shm") if name.startswith("sem.mp-{MARK[:8]}-")])
print(multiprocessing.get_context("fork").Process()._config["semprefix"])
"""
    said = subprocess.run(
        [sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert len(said[0].split()) == 1 and said[1] == f"/mp-{MARK[:8]}"


@pytest.mark.jobs
def test_a_killed_launcher_leaves_its_deputy_to_end_the_rest(tmp_path):
    """The deputy alone: its input ends without `done`."""
    job = subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(600)"],
        process_group=0,
        env={"PACELINE_JOB": "abc"},
    )
    deputy = subprocess.Popen(
        [sys.executable, "-I", "-S", janitor.__file__, "abc", TIMINGS], stdin=subprocess.PIPE
    )
    assert deputy.stdin is not None
    deputy.stdin.write(b"+%d\n" % job.pid)
    deputy.stdin.flush()
    time.sleep(0.1)
    assert job.poll() is None
    deputy.stdin.close()
    assert deputy.wait(60) == 0 and job.wait(60) == -9


@pytest.mark.jobs
def test_who_is_ended_is_told():
    """Also who carries the mark and was never seen before: what it leaves in shared memory is
    known by its number.
    """
    group, other = (
        subprocess.Popen(
            [sys.executable, "-S", "-c", "import time; time.sleep(600)"],
            process_group=0,
            env={"PACELINE_JOB": mark},
        )
        for mark in ("none", "abe")
    )
    assert janitor.sweep_processes("abe", [group.pid], set(), seconds=PATIENCE) == {
        group.pid,
        other.pid,
    }
    assert group.wait(60) == other.wait(60) == -9


@pytest.mark.jobs
@pytest.mark.parametrize("grouped", [True, False])
def test_who_was_ended_does_nothing_any_more(grouped):
    """A killed process has no environment long before it has ended: it may have just made what
    is looked for next.
    """
    body = (
        "import mmap, time; m = mmap.mmap(-1, 1 << 29, mmap.MAP_PRIVATE | mmap.MAP_POPULATE); "
        "print(flush=True); time.sleep(600)"
    )
    name = f"abf{grouped:d}"  # the other one of these tests may run now
    with subprocess.Popen(
        [sys.executable, "-S", "-c", body],
        process_group=0,
        env={"PACELINE_JOB": name},
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stdout.readline()
        janitor.sweep_processes(name, [process.pid] if grouped else [], set(), seconds=PATIENCE)
        assert process.poll() == -9


@pytest.mark.jobs
def test_a_deputy_that_is_told_so_does_nothing():
    job = subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(600)"],
        process_group=0,
        env={"PACELINE_JOB": "abd"},
    )
    deputy = subprocess.Popen(
        [sys.executable, "-I", "-S", janitor.__file__, "abd", TIMINGS], stdin=subprocess.PIPE
    )
    deputy.communicate(b"+%d\ndone\n" % job.pid, 60)
    assert job.poll() is None
    job.kill()
    job.wait()


@pytest.mark.parametrize("same_network", [True, False])
def test_folders_where_nobody_listens_any_more(tmp_path, monkeypatch, same_network):
    """Those of this job's time go; not what others listen in, are about to listen in, or keep
    something else in.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if not same_network:
        monkeypatch.setattr(
            janitor, "_PROC_FOLDER", tmp_path
        )  # the kernel shows no sockets of others
    dead, alive, both, unused, kept = (
        tmp_path / f"pymp-{name}" for name in ("dead", "alive", "both", "unused", "kept")
    )
    with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as other:
        for folder, listener in ((alive, one), (both, other)):
            folder.mkdir()
            listener.bind(str(folder / "listener-1"))
            listener.listen()
        for folder in (dead, both):
            folder.mkdir(exist_ok=True)
            with socket.socket(socket.AF_UNIX) as killed:
                killed.bind(str(folder / "listener-2"))
                killed.listen()
        unused.mkdir()
        kept.mkdir()
        (kept / "notes").touch()
        before = set(tmp_path.iterdir())
        janitor.reclaim_leftovers(MARK, set(), set(), time.time() + 60, seconds=0.05)
        assert set(tmp_path.iterdir()) == before  # of before the job
        janitor.reclaim_leftovers(MARK, set(), set(), time.time() - 60, seconds=0.05)
        assert set(tmp_path.iterdir()) == before - {dead}


@pytest.mark.parametrize("length", [30, 61, 62, 90])
def test_a_socket_of_a_server_has_a_path_that_is_short_enough(tmp_path, monkeypatch, length):
    """A long TMPDIR leaves no room for its name."""
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * (length - 1))
    place = janitor.find_socket_parent()
    assert (place == tempfile.tempdir) == (length <= 61)
    path = f"{place}/{janitor.get_socket_prefix('a' * 32)}{'x' * 8}/server"
    # and not OSError: AF_UNIX path too long
    with socket.socket(socket.AF_UNIX) as caller, pytest.raises(FileNotFoundError):
        caller.connect(path)


def test_the_folders_of_servers_go_with_their_job(tmp_path, monkeypatch):
    """By name: who started a killed server may have been killed with it.

    Those of another job stay.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine, other = (
        Path(tempfile.mkdtemp(prefix=janitor.get_socket_prefix(mark * 16))) for mark in ("ab", "ac")
    )
    (mine / "server").touch()
    janitor.sweep_processes("ab" * 16, [], set(), seconds=PATIENCE)
    assert not mine.exists() and other.exists()
