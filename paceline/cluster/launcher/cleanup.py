"""The cleanup of a job on this host.

What its processes may leave behind is noted while they live, and removed when the job is over.

    launcher ---"+N", "-N"---> janitor     a process of its own, which does the same if the launcher
                                           is killed
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
    """Removes what the processes of a job leave on this host.

    Args:
        mark: The job's mark, which is in the environment of its processes.
        timings: How long to wait for processes and files.
    """

    def __init__(self, mark: str, *, timings: JanitorTimings = DEFAULTS.janitor) -> None:
        self._mark, self._timings = mark, timings
        self._process: subprocess.Popen[bytes] | None = None
        # Folders by process: a child that is killed can't remove its own
        self._litter: dict[int, list[Path]] = {}
        self._known: set[int] = set()  # workers and their children
        self._held: set[int] = set()  # semaphores that they had open when they were killed
        self._began = time.time()

    def start(self) -> None:
        """Start the janitor."""
        # A session of its own: Ctrl-C and the end of the terminal don't reach it. `-I -S` and the
        # standard library make it start fast.
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
        """Kill the rest of a worker's process group, before the worker is reaped.

        Until then no other process can get its number.
        """
        self._known |= janitor.end_group(group, self._held)

    def drop(self, group: int) -> None:
        """Note that a worker is going to be reaped, and nothing is left of its group."""
        self._inform(f"-{group}")

    def collect(self, workers: Sequence[WorkerProcess]) -> None:
        """Note where the workers' children listen.

        A worker that ends in haste kills its children before they can clean up.
        """
        for worker in workers:
            for child in janitor.children(worker.process.pid) if worker.ended is None else ():
                self._known.add(child)
                if child not in self._litter and (folders := janitor.litter([child])):
                    self._litter[child] = folders

    def sweep(self, remaining: Sequence[subprocess.Popen[bytes]]) -> None:
        """Kill these workers and all other processes of the job, and remove their files."""
        self._known |= janitor.sweep(
            self._mark,
            [process.pid for process in remaining],
            self._held,
            seconds=self._timings.ending,
        )
        for process in remaining:
            process.wait()
        janitor.clear([folder for folders in self._litter.values() for folder in folders])
        janitor.reclaim(
            self._mark, self._known, self._held, self._began, seconds=self._timings.unlinking
        )

    def conclude(self) -> None:
        """Let the janitor end: nothing is left for it to do."""
        self._inform("done")
        if self._process is not None:
            self._process.communicate()

    def _inform(self, line: str) -> None:
        """Send the janitor a line."""
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            # The janitor was killed. Workers still die with their launcher, by PR_SET_PDEATHSIG.
            return
