"""How each system is launched so that it survives: commands as data, and the settings of the
peers with the reason for each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import environments
from benchmarks.peers.launchers import Start
from benchmarks.peers.places import Place

HERE = Path(__file__).resolve().parent

# torchft's lighthouse takes a replica for dead after HEARTBEAT_MS without a sign (managers give one
# every 100 ms; its default is 5,000). Until then, or for JOIN_MS, those who ask for a quorum wait
# for it (default 60,000, in its README 10,000). Gloo's waits in an all-reduce end after EXCHANGE
# seconds (5 in its train_ddp.py). With its defaults it would stand still for four seconds more.
HEARTBEAT_MS, JOIN_MS, EXCHANGE = 1000, 1000, 5.0

# Without it workers that are started again find the addresses of the dead ones in torchrun's store,
# and Gloo doesn't connect (torch 2.13; https://github.com/pytorch/pytorch/issues/135712): torchrun
# then never comes back from a fault here.
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@dataclass(frozen=True)
class Job:
    """What to launch: `words` are the arguments that all programs take, `faults` how many a run
    has to survive.
    """

    place: Place
    workers: int
    faults: int
    words: Sequence[str]

    def program(self, name: str) -> tuple[str, ...]:
        """A program of this folder with the arguments of all."""
        return (str(HERE / name), *self.words)


@dataclass(frozen=True)
class System:
    """One of those compared. `environment`: of `benchmarks.peers`, None for the driver's own."""

    name: str
    title: str
    starts: Callable[[Job], list[Start]]
    environment: str | None = None


def paceline(job: Job) -> list[Start]:
    """`paceline run` that goes on with two workers, and starts again whoever died."""
    flags = ("--workers", str(job.workers), "--min-workers", "2", "--restarts", str(job.faults))
    return [Start(0, (sys.executable, "-m", "paceline", "run", *flags, *job.program("train.py")))]


def torchrun(job: Job, every: int) -> list[Start]:
    """torchrun that starts all workers again when one died."""
    flags = (
        "--standalone",
        "--nproc-per-node",
        str(job.workers),
        "--max-restarts",
        str(job.faults),
    )
    command = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        *flags,
        *job.program("train_ddp.py"),
        "--every",
        str(every),
    )
    return [Start(0, command, FRESH_STORE)]


def torchft(job: Job) -> list[Start]:
    """A lighthouse, and a torchrun for each replica group of one worker, as torchft's torchx
    component starts them.
    """
    python, port = environments.python_of("torchft"), job.place.port()
    light = (
        str(python.parent / "torchft_lighthouse"),
        "--min_replicas",
        "2",
        "--bind",
        f"127.0.0.1:{port}",
    )
    times = ("--heartbeat_timeout_ms", str(HEARTBEAT_MS), "--join_timeout_ms", str(JOIN_MS))
    starts = [Start(0, (*light, *times), {"RUST_LOG": "warn"}, helper=True)]
    for replica in range(job.workers):
        flags = (
            "--nnodes",
            "1",
            "--nproc-per-node",
            "1",
            "--max-restarts",
            str(job.faults),
            "--master-port",
            str(job.place.port()),
        )
        words = (
            *job.program("train_torchft.py"),
            "--replica",
            str(replica),
            "--exchange-timeout",
            str(EXCHANGE),
        )
        environ = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "RUST_LOG": "warn"}
        starts.append(
            Start(0, (str(python), "-m", "torch.distributed.run", *flags, *words), environ)
        )
    return starts


def systems(every: Sequence[int]) -> dict[str, System]:
    """All that are compared; torchrun once for each number of steps between two checkpoints."""
    runs = [
        System(
            f"torchrun-{steps}",
            f"torchrun, checkpoint every {steps} steps",
            lambda job, steps=steps: torchrun(job, steps),
        )
        for steps in every
    ]
    found = [
        System("paceline", "paceline", paceline),
        *runs,
        System("torchft", "torchft", torchft, "torchft"),
    ]
    return {system.name: system for system in found}
