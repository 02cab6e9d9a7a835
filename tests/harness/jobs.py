"""Whole jobs as a user types them: `python -m paceline run ...` on a script, and the check that
nothing of them is left.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from paceline.cluster.launcher import janitor
from tests.harness import nursery, short_timings
from tests.harness.preloaded import ROOM

ROOT = Path(__file__).parents[2]
# seconds after which a test says that it hangs: a busy machine may be many times slower than a
# quiet one
PATIENCE = 120.0
SHARED = Path("/dev/shm")
MARK = "PACELINE_TEST_MARK"
PLAIN, PRELOADED = ("-m", "paceline"), (str(ROOT / "tests" / "harness" / "preloaded.py"),)
# how torch, multiprocessing and we name shared memory; others may have files there
OWN = ("torch_", "sem.", "psm_", "paceline")
# temporary folders that torch.optim and torchrun leave, with or without us
TORCHS_OWN = ("torchinductor_", "torchelastic_")
# how the names end of what W&B leaves there where its process is killed
KILLED_WANDBS = ("wandb-artifacts", "wandb-media", ".sock")
FOREIGN = (
    "OMP_",
    "PACELINE_",
    "SLURM_",
    "OMPI_",
    "PMI",
    "MASTER_",
    "TORCHELASTIC_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
)

# What most scripts here begin with. `parts` makes a small model, an optimizer and a loader ready.
PRELUDE = """
import os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline as pl

rank = int(os.environ.get("RANK", 0))

def parts(run, model=None, samples=64, batch=8, **options):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(samples, 4), torch.randn(samples, 1))
    model = model or nn.Linear(4, 1)
    return run.prepare(model, torch.optim.SGD(model.parameters(), 0.01), DataLoader(data, batch_size=batch, **options))

def step(run, model, optimizer, x, y):
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.log(loss=loss)
"""  # noqa: E501


class Ended(NamedTuple):
    """How a job ended: exit code, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        """The last line of the errors."""
        return self.err.splitlines()[-1]

    @property
    def said(self) -> str:
        """The line before it, without its rank: what the worker that is to blame said last."""
        return self.err.splitlines()[-2].partition("] ")[2]


class Job:
    """A command under test, whose processes carry a mark that tells them from all others."""

    def __init__(
        self,
        command: list[str],
        folder: Path,
        temporary: Path,
        *,
        forked: bool = False,
        group: int | None = None,
        **environ: str,
    ) -> None:
        self.mark = uuid.uuid4().hex
        kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        path = os.pathsep.join(
            [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        ).rstrip(os.pathsep)
        own = {
            "PYTHONPATH": path,
            "TMPDIR": str(temporary),
            "OMP_NUM_THREADS": "1",
            MARK: self.mark,
            ROOM: " " * 4096,
            **short_timings.environ(),
        }
        whole = kept | own | environ
        self.process: subprocess.Popen[str] | nursery.Nursed
        if forked and command[1].endswith(".py"):
            self.process = nursery.launcher(command, cwd=folder, env=whole, group=group)
        else:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            self.process = subprocess.Popen(
                command, **pipes, text=True, cwd=folder, env=whole, process_group=group
            )

    def end(self, seconds: float = PATIENCE) -> Ended:
        """Wait for its end; if it doesn't come, what it has said so far."""
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as waited:
            said = b"".join([waited.output or b"", b"\n", waited.stderr or b""]).decode(
                errors="replace"
            )
            raise AssertionError(f"it didn't end in {seconds} s, and had said:\n{said}") from None
        return Ended(self.process.returncode, out, err)

    def processes(self) -> list[psutil.Process]:
        """All of its processes that live."""
        return marked({self.mark})

    def workers(self) -> list[psutil.Process]:
        """Its workers that have been started, by rank (children of the launcher that are
        programs of their own by now).
        """
        by_rank = {}
        for process in psutil.Process(self.process.pid).children():
            try:
                by_rank[int(process.environ()["RANK"])] = process
            except (KeyError, psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                continue
        return [by_rank[rank] for rank in sorted(by_rank)]

    def worker(self, rank: int) -> psutil.Process:
        """The process of this rank."""
        return next(process for process in self.workers() if process.environ()["RANK"] == str(rank))

    def ports(self) -> set[int]:
        """The ports on which its processes listen."""
        return listening({process.pid for process in self.processes()})


class Jobs:
    """Starts jobs in a folder of their own, and looks at what they leave."""

    def __init__(self, folder: Path, temporary: Path, launcher: Sequence[str]) -> None:
        self.folder, self.temporary, self.launcher = folder, temporary, launcher
        self.ports: set[int] = set()  # on which jobs have listened
        self._before = shared_memory()
        self._started: list[Job] = []

    def write(self, body: str, name: str = "script.py") -> str:
        """A script of these lines after the prelude."""
        (self.folder / name).write_text(PRELUDE + body)
        return name

    def start(self, command: list[str], *, group: int | None = None, **environ: str) -> Job:
        """Start any command; a script of Python, as our launcher is one where workers are
        `PRELOADED`, is forked there.

        `group` is the process group of the command; 0, as at a terminal, makes one of its own.
        """
        self._started.append(
            Job(
                command,
                self.folder,
                self.temporary,
                forked=self.launcher == PRELOADED,
                group=group,
                **environ,
            )
        )
        return self._started[-1]

    def run(
        self, body: str, workers: int = 2, *options: str, args: tuple[str, ...] = (), **environ: str
    ) -> Job:
        """`paceline run --workers N OPTIONS script.py ARGS`."""
        path = self.folder / "script.py"
        # which workers may still be about to read
        other = path.exists() and path.read_text() != PRELUDE + body
        script = self.write(body, f"script{len(self._started)}.py" if other else path.name)
        return self.start(
            [
                sys.executable,
                *self.launcher,
                "run",
                "--workers",
                str(workers),
                *options,
                script,
                *args,
            ],
            **environ,
        )

    def without_secret(self, body: str) -> list[Ended]:
        """What becomes of a job of two hosts whose launcher isn't ours, and gives it no secret."""
        port, started = str(free_port()), list[Job]()
        for rank in range(2):
            place = {
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "1",
                "GROUP_RANK": str(rank),
            }
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PACELINE_INTERFACE": "lo"}
            started.append(self.start([sys.executable, self.write(body)], **place, **meeting))
        return [each.end() for each in started]

    def program(
        self,
        path: Path,
        workers: int = 2,
        *options: str,
        args: tuple[str, ...] = (),
        **environ: str,
    ) -> Job:
        """The same with a program that is there."""
        return self.start(
            [
                sys.executable,
                *self.launcher,
                "run",
                "--workers",
                str(workers),
                *options,
                str(path),
                *args,
            ],
            **environ,
        )

    def left(self, seconds: float = 30.0) -> list[str]:
        """What is left of all jobs after at most these seconds: processes, shared memory,
        temporary files.
        """
        end = time.monotonic() + seconds
        while (remains := self._left()) and time.monotonic() < end:
            time.sleep(0.05)
        return remains

    def _left(self) -> list[str]:
        processes = [str(process) for process in marked({job.mark for job in self._started})]
        files = [
            str(path)
            for path in self.temporary.iterdir()
            if not (path.name.startswith(TORCHS_OWN) or _of_wandb(path))
        ]
        ports = [f"port {port}" for port in sorted(self.ports & listening())] if self.ports else []
        shared = sorted(shared_memory() - self._before)
        shared = shared if processes else unused(shared)  # what another test uses is not ours
        return [*processes, *shared, *files, *ports]

    def kill(self) -> None:
        """End what a failing test has left."""
        for job in self._started:
            if job.process.poll() is None:
                job.process.kill()
                job.process.communicate()
        for process in marked({job.mark for job in self._started}):
            process.kill()


@contextmanager
def jobs(folder: Path, launcher: Sequence[str] = PRELOADED) -> Iterator[Jobs]:
    """Jobs in `folder`, of which nothing may be left in the end; launchers and workers are
    forked, or are programs if `PLAIN`.
    """
    # a short name: sockets are made in it
    with tempfile.TemporaryDirectory(prefix="pl-") as temporary:
        started = Jobs(folder, Path(temporary), launcher)
        try:
            yield started
            left = started.left()
        finally:
            started.kill()
        assert not left, f"left behind: {left}"


def marked(marks: Collection[str]) -> list[psutil.Process]:
    """All processes that live and have one of these marks: zombies have no environment any more."""
    wanted = {f"{MARK}={mark}".encode() for mark in marks}
    found = []
    for pid in janitor.list_processes():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if not wanted.isdisjoint(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                found.append(psutil.Process(pid))
    return found


def _of_wandb(path: Path) -> bool:
    """Whether this is what W&B leaves in the folder of temporary files, with or without us,
    where it is killed.
    """
    return "wandb" in path.name and path.name.endswith(KILLED_WANDBS)


def shared_memory() -> set[str]:
    """The files of shared memory that may be ours."""
    return (
        {name for name in os.listdir(SHARED) if name.startswith(OWN)} if SHARED.is_dir() else set()
    )


def unused(names: Iterable[str]) -> list[str]:
    """Those of these files of shared memory that no process has open; tests that run side by
    side leave each other's out so.
    """
    return [name for name in names if not janitor.is_in_use(SHARED / name)]


def listening(pids: set[int] | None = None) -> set[int]:
    """The TCP ports on which these processes (None: all) listen."""
    entries = (
        entry for entry in psutil.net_connections("tcp") if entry.status == psutil.CONN_LISTEN
    )
    return {entry.laddr.port for entry in entries if pids is None or entry.pid in pids}


def wait_for(condition: Callable[[], Any], seconds: float = PATIENCE) -> None:
    """Return once `condition()` holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.02)


def free_port() -> int:
    """A port of the loopback that nobody uses now, and that no system gives to who asks for any."""
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        with socket.socket() as chosen, contextlib.suppress(OSError):
            chosen.bind(("127.0.0.1", port))
            return port
