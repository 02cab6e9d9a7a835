"""The cleanup of a job on this host: what its processes may leave is noted while they live, and
removed when the job is over.

launcher --"+N", "-N"--> janitor     a process of its own, which does the same if the launcher is
                                     killed
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from paceline.cluster.launcher import janitor
from paceline.cluster.launcher.worker import WorkerProcess
from paceline.timings import DEFAULTS, JanitorTimings


class JobCleanup:
    """Removes what the processes of the job with this mark leave on this host."""

    def __init__(self, mark: str, *, timings: JanitorTimings = DEFAULTS.janitor) -> None:
        self._mark, self._timings = mark, timings
        self._process: subprocess.Popen[bytes] | None = None
        # by process: what a child that is killed can't remove
        self._litter: dict[int, list[Path]] = {}
        self._known: set[int] = set()  # workers and their children
        self._held: set[int] = set()  # semaphores that they had in hand when they were ended
        self._began = time.time()

    def start(self) -> None:
        """Start the janitor."""
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                str(Path(janitor.__file__)),
                self._mark,
                json.dumps(asdict(self._timings)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    def add(self, group: int) -> None:
        """Note a worker, which leads this process group."""
        self._known.add(group)
        self._inform(f"+{group}")

    def end_group(self, group: int) -> None:
        """End what is left of a worker's process group, before the worker is reaped: until then
        no other process gets its number.
        """
        self._known |= janitor.end_group(group, self._held)

    def drop(self, group: int) -> None:
        """Note that a worker is about to be reaped, and nothing is left of its group."""
        self._inform(f"-{group}")

    def collect(self, workers: Sequence[WorkerProcess]) -> None:
        """Note where the workers' children listen: a worker that ends in haste kills them before
        they can clean up.
        """
        for worker in workers:
            for child in janitor.children(worker.process.pid) if worker.ended is None else ():
                self._known.add(child)
                if child not in self._litter and (folders := janitor.litter([child])):
                    self._litter[child] = folders

    def sweep(self, left: Sequence[subprocess.Popen[bytes]]) -> None:
        """End these workers and all else that is left of the job, and remove what they leave."""
        self._known |= janitor.sweep(
            self._mark, [process.pid for process in left], self._held, seconds=self._timings.ending
        )
        for process in left:
            process.wait()
        janitor.clear([folder for folders in self._litter.values() for folder in folders])
        janitor.reclaim(
            self._mark, self._known, self._held, self._began, seconds=self._timings.unlinking
        )

    def conclude(self) -> None:
        """Let the janitor go: nothing is left for it."""
        self._inform("done")
        if self._process is not None:
            self._process.communicate()

    def _inform(self, line: str) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            # the janitor was killed; workers still die with their launcher, by PR_SET_PDEATHSIG
            return
