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
from paceline.timings import DEFAULT_TIMINGS, JanitorTimings


class JobCleanup:
    """Removes what the processes of a job leave on this host.

    Args:
        mark: The job's mark, which is in the environment of its processes.
        timings: How long to wait for processes and files.
    """

    def __init__(self, mark: str, *, timings: JanitorTimings = DEFAULT_TIMINGS.janitor) -> None:
        self._mark, self._timings = mark, timings
        self._process: subprocess.Popen[bytes] | None = None
        # Folders by process: a child that is killed can't remove its own
        self._litter_by_process: dict[int, list[Path]] = {}
        self._seen_processes: set[int] = set()  # workers and their children
        self._held_semaphores: set[int] = (
            set()
        )  # semaphores that they had open when they were killed
        self._began_at = time.time()

    def start_janitor(self) -> None:
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

    def add_group(self, group: int) -> None:
        """Note a worker, which leads this process group."""
        self._seen_processes.add(group)
        self._send_line(f"+{group}")

    def end_group(self, group: int) -> None:
        """Kill the rest of a worker's process group, before the worker is reaped.

        Until then no other process can get its number.
        """
        self._seen_processes |= janitor.end_group(group, self._held_semaphores)

    def drop_group(self, group: int) -> None:
        """Note that a worker is going to be reaped, and nothing is left of its group."""
        self._send_line(f"-{group}")

    def collect_litter(self, workers: Sequence[WorkerProcess]) -> None:
        """Note where the workers' children listen.

        A worker that ends in haste kills its children before they can clean up.
        """
        for worker in workers:
            for child in (
                janitor.list_children(worker.process.pid) if worker.ended_at is None else ()
            ):
                self._seen_processes.add(child)
                if child not in self._litter_by_process and (
                    folders := janitor.find_litter([child])
                ):
                    self._litter_by_process[child] = folders

    def sweep_job(self, remaining: Sequence[subprocess.Popen[bytes]]) -> None:
        """Kill these workers and all other processes of the job, and remove their files."""
        self._seen_processes |= janitor.sweep_processes(
            self._mark,
            [process.pid for process in remaining],
            self._held_semaphores,
            seconds=self._timings.ending,
        )
        for process in remaining:
            process.wait()
        janitor.remove_folders(
            [folder for folders in self._litter_by_process.values() for folder in folders]
        )
        janitor.reclaim_leftovers(
            self._mark,
            self._seen_processes,
            self._held_semaphores,
            self._began_at,
            seconds=self._timings.unlinking,
        )

    def end_janitor(self) -> None:
        """Let the janitor end: nothing is left for it to do."""
        self._send_line("done")
        if self._process is not None:
            self._process.communicate()

    def _send_line(self, line: str) -> None:
        """Send the janitor a line."""
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            # The janitor was killed. Workers still die with their launcher, by PR_SET_PDEATHSIG.
            return
