"""Workers that are forked are, to everybody else, those that start by themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import nursery
from tests.harness.jobs import PATIENCE, PLAIN, PRELOADED, jobs, wait_for
from tests.harness.preloaded import ROOM

pytestmark = pytest.mark.slow

READING = """
import gc, threading, time
import tests.harness.generator_lock
import torch

def read():
    for _ in range(1000):
        torch.get_rng_state()

gc.callbacks.append(lambda *_: time.sleep(0))
gc.set_threshold(1)
threads = [threading.Thread(target=read, daemon=True) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""

BODY = """
import json, signal, threading
from pathlib import Path

preloaded = sys.argv[1]
environ = dict(line.split("=", 1) for line in Path("/proc/self/environ").read_text().split("\\0") if line)
found = {
    "same": environ == dict(os.environ),
    "names": sorted(environ.keys() - {"PACELINE_TEST_ROOM"}),
    "rank": environ["RANK"],
    "command": Path("/proc/self/cmdline").read_text().rstrip("\\0").split("\\0")[1:2] + sys.argv[2:],
    "arguments": sys.argv[2:],
    "name": [__name__, Path(__file__).name, Path(sys.path[0]).resolve() == Path(sys.argv[0]).resolve().parent],
    "group": os.getpgid(0) == os.getpid(),
    "descriptors": sorted(os.readlink(f"/proc/self/fd/{number}").partition(":")[0] for number in range(3)),
    "count": len(os.listdir("/proc/self/fd")),
    "signals": [str(signal.getsignal(number)) for number in (1, 2, 15, 17)],
    "threads": [thread.name for thread in threading.enumerate()],
    "main": sys.modules["__main__"].__dict__ is globals(),
}
Path(f"{preloaded}{rank}.json").write_text(json.dumps(found))
import atexit
atexit.register(lambda: Path(f"{preloaded}{rank}.left").write_text("left"))
print("said", end="")
if rank == 1:
    # A worker that fails ends the others: rank 0 has to have left before.
    limit = time.monotonic() + 60
    while not Path(f"{preloaded}0.left").exists() and time.monotonic() < limit:
        time.sleep(0.01)
    sys.exit("that was all")
"""  # noqa: E501


def test_all_that_a_worker_finds_is_the_same_and_how_it_ends(tmp_path: Path) -> None:
    ends = {}
    for name, launcher in (("plain", PLAIN), ("preloaded", PRELOADED)):
        with jobs(tmp_path, launcher) as job:
            ends[name] = job.run(BODY, 2, args=(name, "a", "b c")).end()
        assert all((tmp_path / f"{name}{rank}.left").exists() for rank in range(2))
    for rank in range(2):
        plain, preloaded = (
            json.loads((tmp_path / f"{name}{rank}.json").read_text()) for name in ends
        )
        assert plain["same"] and preloaded == plain and ROOM not in preloaded["names"]
    plain, preloaded = ends.values()
    assert (preloaded.code, sorted(preloaded.out.split()), sorted(preloaded.err.splitlines())) == (
        plain.code,
        sorted(plain.out.split()),
        sorted(plain.err.splitlines()),
    )
    assert plain.code == 1 and "[1] that was all" in plain.err


ENDINGS = {
    "raise ValueError('boom')": "failed with exit code 1",
    "sys.exit(7)": "failed with exit code 7",
    "os.kill(os.getpid(), 9)": "was killed by SIGKILL",
    "__import__('ctypes').string_at(0)": "was killed by SIGSEGV",
    "raise KeyboardInterrupt": "was killed by SIGINT",
}


def test_each_ending_is_told_as_it_is(tmp_path: Path) -> None:
    with jobs(tmp_path, PRELOADED) as job:
        started = [job.run(f"if rank == 1: {body}\ntime.sleep(600)", 2) for body in ENDINGS]
        for launched, (body, words) in zip(started, ENDINGS.items(), strict=True):
            ended = launched.end()
            assert words in ended.last and ended.last.startswith("paceline: rank 1 on "), (
                body,
                ended.err,
            )
            if "boom" in body:
                assert ended.said == "ValueError: boom" and "preloaded" not in ended.err, ended.err


ALONE = """
import json, os, sys
from pathlib import Path

print(json.dumps([__name__, sys.argv, os.getcwd(), os.environ["PATH"], Path(sys.path[0]).resolve() == Path(__file__).resolve().parent]))
print("an error", file=sys.stderr)
sys.exit(3)
"""  # noqa: E501


def test_a_script_that_is_forked_is_as_if_it_were_started(tmp_path: Path) -> None:
    path = tmp_path / "alone.py"
    path.write_text(ALONE)
    plain = subprocess.run(
        [sys.executable, str(path), "a", "b c"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    forked = nursery.run_script(path, tmp_path, "a", "b c")
    assert (forked.returncode, forked.stdout, forked.stderr) == (
        plain.returncode,
        plain.stdout,
        plain.stderr,
    ) and plain.returncode == 3


SERVED = """
with pl.start(sync=pl.ParameterServer(servers=1)) as run:
    model, optimizer, loader = parts(run, samples=10**5)
    for number, (x, y) in enumerate(loader):
        step(run, model, optimizer, x, y)
        open(f"up{rank}", "w").close()
        time.sleep(0.05)
"""


@pytest.mark.parametrize(
    "launcher", [pytest.param(PLAIN, marks=pytest.mark.soak), PRELOADED], ids=["plain", "preloaded"]
)
def test_a_server_is_one_of_its_worker_s_processes(
    tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    """With its environment, in its group; it ends with it, and without the others."""
    with jobs(tmp_path, launcher) as job:
        launched = job.run(SERVED, 2)
        wait_for(
            lambda: (
                launched.process.poll() is not None
                or all((tmp_path / f"up{rank}").exists() for rank in range(2))
            ),
            60,
        )
        (server,) = [
            process
            for process in launched.processes()
            if "paceline.servers.process.main" in process.cmdline()
        ]
        first = launched.worker(0)
        assert (
            os.getpgid(server.pid) == first.pid
            and server.environ()["RANK"] == "0"
            and server.cwd() == str(tmp_path)
        )
        server.kill()
        ended = launched.end()
        assert (
            ended.code == 1
            and "killed by SIGKILL (exit code 137): what it kept is lost" in ended.err
        ), ended.err
        launched = job.run(SERVED, 1)
        (tmp_path / "up0").unlink()
        wait_for(lambda: launched.process.poll() is not None or (tmp_path / "up0").exists(), 60)
        launched.worker(0).kill()
        assert launched.end().code == 137 and not job.left()


def test_workers_die_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with jobs(tmp_path, PRELOADED) as job:
        launched = job.run("open(f'up{rank}', 'w').close()\ntime.sleep(600)", 2)
        wait_for(lambda: all((tmp_path / f"up{rank}").exists() for rank in range(2)))
        assert [process.environ()["RANK"] for process in launched.workers()] == ["0", "1"]
        launched.process.send_signal(signal.SIGKILL)
        launched.end()
        assert not job.left()


FORKING = """
import os, signal, threading, time
from tests.harness.generator_lock import get_rng_state

def read():
    inside.set()
    time.sleep(0.5)  # it is forked by then, or waits for this

inside = threading.Event()
reader = threading.Thread(target=get_rng_state, args=(read,))
reader.start()
inside.wait()
if (child := os.fork()) == 0:
    signal.alarm(20)  # the end of one that waits
    get_rng_state()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
reader.join()
"""


def test_threads_that_read_the_state_of_the_generator_never_wait_for_each_other_for_good() -> None:
    """They did, where Python looked for garbage while torch held the lock of its generator."""
    subprocess.run([sys.executable, "-c", READING], check=True, timeout=PATIENCE)


def test_forked_processes_read_it_whatever_threads_did_at_that_moment() -> None:
    """Readers of a DataLoader are forked while another worker on threads reads it, and none
    finds the lock taken for good.
    """
    subprocess.run([sys.executable, "-c", FORKING], check=True, timeout=PATIENCE)
