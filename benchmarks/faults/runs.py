"""One run of one system: launch it, kill workers when it is steady, wait for its end, and say
what it came to.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.faults import accounting
from benchmarks.faults.accounting import STEADY, Notes
from benchmarks.faults.systems import Job, System
from benchmarks.peers import places
from benchmarks.peers.environments import last_words
from benchmarks.peers.places import Place, Process

AFTER = (1.0, 3.0)  # seconds from a steady state to the next kill
GRACE = 20.0  # seconds that the others have when one has ended
LOOK = 0.05  # seconds between two looks at what workers have written


class RunError(RuntimeError):
    """A run didn't get to its end; the text says why in a line."""


class Fault(NamedTuple):
    """Kill the worker with this rank so many seconds after the run has become steady (again)."""

    rank: int
    seconds: float


@dataclass(frozen=True)
class Training:
    """What all systems train: `share` samples of each step for each of the workers, one epoch of
    so many steps.
    """

    model: str
    workers: int
    share: int
    steps: int
    deadline: float

    def words(self, out: Path) -> tuple[str, ...]:
        """As arguments of the programs."""
        sizes = (
            "--workers",
            str(self.workers),
            "--share",
            str(self.share),
            "--steps",
            str(self.steps),
        )
        return ("--model", self.model, *sizes, "--out", str(out))


def schedule(seed: int, faults: int, workers: int) -> list[Fault]:
    """Who is killed when; the same for all systems."""
    chance = random.Random(seed)
    return [Fault(chance.randrange(workers), chance.uniform(*AFTER)) for _ in range(faults)]


class Run:
    """A launched system, watched through what its workers write."""

    def __init__(
        self, system: System, training: Training, faults: int, place: Place, out: Path
    ) -> None:
        self.training, self.out, self.notes = training, out, Notes(out)
        self._title, self._log = system.title, (out / "log").open("wb")
        self._helpers: list[Process] = []
        self._others: list[Process] = []
        self._end = time.monotonic() + training.deadline
        for start in system.starts(Job(place, training.workers, faults, training.words(out))):
            environ = {**places.surroundings(place), **start.environ}
            process = place.spawn(start.host, start.command, environ, self._log)
            (self._helpers if start.helper else self._others).append(process)

    def kill(self, fault: Fault) -> float | None:
        """Kill a worker as scheduled, and give the moment; None if the training was over before."""
        above = max((turn.step for turn in self.notes.turns if turn.taken), default=-1)
        if not self._wait(lambda: self._steady(above)):
            return None
        moment = time.monotonic() + fault.seconds
        if not self._wait(lambda: time.monotonic() >= moment):
            return None
        for worker, turn in self.notes.latest.items():
            if turn.rank == fault.rank and Path(f"/proc/{worker}").exists():
                os.kill(int(worker), signal.SIGKILL)
                return time.monotonic()
        raise RunError(
            f"{self._title}: no worker of rank {fault.rank} is alive {fault.seconds:.1f} s after "
            "all took part"
        )

    def finish(self) -> None:
        """Wait for the end of all processes; raises if there is none, or no weights are left."""
        self._wait(lambda: False)
        self.notes.poll()
        if not list(self.out.glob("weights-*.pt")):
            codes = [process.returncode for process in self._others]
            raise RunError(
                f"{self._title}: exit codes {codes}: "
                f"{last_words((self.out / 'log').read_text(errors='replace'))}"
            )

    def close(self) -> None:
        """End what is left of it."""
        places.end([*self._others, *self._helpers])
        self._log.close()

    def _steady(self, above: int) -> bool:
        """Whether all workers took part in some steps in a row beyond `above`."""
        size = self.training.workers
        count: dict[int, int] = {}
        for turns in self.notes.turns:
            if turns.taken and turns.size == size and turns.step > above:
                count[turns.step] = count.get(turns.step, 0) + 1
        return sum(1 for taken in count.values() if taken == size) >= STEADY

    def _wait(self, ready: Any) -> bool:
        """Until `ready()`; False if the launchers ended before."""
        over = None
        while not ready():
            if time.monotonic() > self._end:
                raise RunError(
                    f"{self._title}: not done after {self.training.deadline:.0f} s; it last said: "
                    f"{self._said()}"
                )
            ended = [process.poll() is not None for process in self._others]
            if any(ended):
                over = over or time.monotonic()
                if all(ended) or time.monotonic() > over + GRACE:
                    return False
            time.sleep(LOOK)
            self.notes.poll()
        return True

    def _said(self) -> str:
        return last_words((self.out / "log").read_text(errors="replace")[-10_000:])


def run(
    system: System,
    training: Training,
    faults: Sequence[Fault],
    place: Place,
    keep: Path | None = None,
) -> dict[str, Any]:
    """Train, kill, and account for it; `keep` is a folder for what the workers wrote."""
    out = Path(tempfile.mkdtemp(prefix=f"{system.name}-", dir=place.folder))
    running = Run(system, training, len(faults), place, out)
    try:
        kills = [moment for fault in faults if (moment := running.kill(fault)) is not None]
        running.finish()
        return summary(running.notes.turns, training, kills, weights(out))
    finally:
        running.close()
        place.sweep()
        if keep is not None:
            shutil.copytree(out, keep / out.name)
        shutil.rmtree(out, ignore_errors=True)


def weights(out: Path) -> torch.Tensor:
    """The final weights; raises if workers have different ones."""
    found = [torch.load(path, weights_only=True) for path in sorted(out.glob("weights-*.pt"))]
    if any(not torch.equal(found[0], other) for other in found[1:]):
        raise RunError(f"{out.name}: the workers' final weights differ")
    return found[0]


def summary(
    turns: Sequence[accounting.Turn],
    training: Training,
    kills: Sequence[float],
    final: torch.Tensor,
) -> dict[str, Any]:
    """What is kept of a run."""
    workers = training.workers
    taken = accounting.moments(turns)
    if len(taken) < training.steps:
        raise RunError(f"{len(taken)} of {training.steps} steps were taken")
    return {
        "step": accounting.usual(turns, workers),
        "seconds": taken[max(taken)] - taken[min(taken)],
        "samples": accounting.samples(turns, training.steps * training.share * workers)._asdict(),
        "faults": [cost._asdict() for cost in accounting.costs(turns, kills, workers)],
        "kills": list(kills),
        "weights": final,
    }


def away(one: torch.Tensor, other: torch.Tensor) -> float:
    """|one - other| / |other|."""
    return float((one - other).double().norm() / other.double().norm())
