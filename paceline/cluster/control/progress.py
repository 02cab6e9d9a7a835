"""The progress page of a worker: a few numbers in a mapped file, with a breakpoint before a step.

    launcher   rank, host, pid, threads --------+
    worker     began, step, holding ------------+--> FOLDER/rank-N (mapped by all three)
    watcher    hold: the step to wait before ---+

Each number has one writer. A page may exist before its worker does: a watcher that writes `hold`
into it by then misses no step. `paceline run` makes a page for each of its workers if
PACELINE_PROGRESS names a folder. A step then costs two accesses to memory.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from pathlib import Path
from typing import Final

from paceline.errors import DeadlineExceeded, ResourceError

_POLL_SECONDS = 0.001  # between two checks of a waiting worker whether it may go on
_SILENT_SECONDS = 1.0  # a longer wait is announced
# Indices of the 64-bit numbers. Each number is stored plus one: 0 means "not set".
_RANK, _HOST, _THREADS, _PID, _BORN, _BEGAN, _STEP, _HOLD, _HOLDING = range(9)
_NBYTES: Final = 8 * 9


def page_path(folder: str | Path, rank: int) -> Path:
    """Path of a worker's page."""
    return Path(folder) / f"rank-{rank}"


def read_birth(pid: int) -> int | None:
    """Read the time at which a process was started, in the kernel's ticks since boot.

    Together with its pid it identifies the process, as pids are used again. None: it is gone.
    """
    try:
        # The name of the program, in brackets, may contain blanks and brackets itself.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def open_page(file: str | None, began: float, *, deadline: float) -> ProgressPage | None:
    """Open the page of this worker, and write that its run has begun.

    Args:
        file: The page. None: this worker has none.
        began: When the run began (`time.time()`).
        deadline: Seconds that a wait may take.
    """
    if file is None:
        return None
    page = ProgressPage(Path(file), deadline=deadline)
    page.write_begin(began)
    return page


def read_run_folder(file: Path) -> Path | None:
    """Read the run folder of the worker with this page. None if it had none."""
    return (
        Path(_folder_file(file).read_text(encoding="utf-8"))
        if _folder_file(file).exists()
        else None
    )


def _folder_file(page: Path) -> Path:
    return page.with_name(f"{page.name}.folder")


class ProgressPage:
    """The page of one worker. Numbers that are not set yet read as -1.

    `deadline` is the time in seconds that a worker waits at a breakpoint.
    """

    def __init__(self, file: Path, *, deadline: float = 120.0) -> None:
        self.file, self._deadline = file, deadline
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if os.fstat(descriptor).st_size < _NBYTES:
                    os.ftruncate(descriptor, _NBYTES)
                self._memory = mmap.mmap(descriptor, _NBYTES)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise ResourceError(
                f"the page {file} for a worker's progress can't be made ({error.strerror}); "
                "set PACELINE_PROGRESS to a folder that exists and can be written to, or unset it"
            ) from error
        self._cells = memoryview(self._memory).cast("q")

    def close(self) -> None:
        """Unmap the file. A second call does nothing."""
        self._cells.release()
        self._memory.close()

    # ---- written by the launcher

    def describe_worker(self, rank: int, host: int, threads: int) -> None:
        """Describe a worker that is about to be started. `hold` stays as it is.

        Args:
            rank: Rank of the worker.
            host: Number of its host in the job.
            threads: Number of its threads.
        """
        for cell in (_PID, _BORN, _BEGAN, _STEP, _HOLDING):
            self._cells[cell] = 0
        self._cells[_RANK], self._cells[_HOST], self._cells[_THREADS] = (
            rank + 1,
            host + 1,
            threads + 1,
        )

    def write_process(self, pid: int) -> None:
        """Write the process of the worker."""
        born = read_birth(pid)
        # `_PID` comes last: a page with a pid has its birth too.
        self._cells[_BORN] = 0 if born is None else born + 1
        self._cells[_PID] = pid + 1

    # ---- written by the worker

    def write_begin(self, began: float) -> None:
        """Write the time at which the worker's run began (`time.time()`)."""
        self._cells[_BEGAN] = int(began * 1e9) + 1

    def write_run_folder(self, folder: Path) -> None:
        """Write the folder of the worker's run, for `read_run_folder`, also after the run."""
        _folder_file(self.file).write_text(str(folder.absolute()), encoding="utf-8")

    def reach_step(self, step: int) -> float:
        """Write the number of steps taken before the next one begins, and wait if asked to.

        Returns the seconds spent waiting. Raises `DeadlineExceeded` if the worker isn't released in
        time.
        """
        cells = self._cells
        cells[_STEP] = step + 1
        return self._wait_at_breakpoint(step) if 0 < cells[_HOLD] <= step + 1 else 0.0

    def write_step(self, step: int) -> None:
        """Write the number of steps taken."""
        self._cells[_STEP] = step + 1

    def _wait_at_breakpoint(self, step: int) -> float:
        """Wait until the watcher releases the worker. Returns the seconds."""
        cells, began, announced = self._cells, time.monotonic(), False
        cells[_HOLDING] = 2
        try:
            while 0 < cells[_HOLD] <= step + 1:
                waited = time.monotonic() - began
                if waited > _SILENT_SECONDS and not announced:
                    announced = True
                    print(
                        (
                            f"paceline: rank {self.rank} is held before step {step}, as "
                            f"{self.file} asks"
                        ),
                        file=sys.stderr,
                        flush=True,
                    )
                if waited > self._deadline:
                    raise DeadlineExceeded(
                        f"rank {self.rank} was held before step {step} for {self._deadline:g} s by "
                        f"{self.file}, and wasn't released; "
                        "the program that holds a worker has to call release() on its page"
                    )
                time.sleep(_POLL_SECONDS)
        finally:
            cells[_HOLDING] = 1
        return time.monotonic() - began

    # ---- written by observers

    def hold_before(self, step: int) -> None:
        """Make the worker wait before a step (counted from 0).

        If it is past that step, it waits before its next one.
        """
        self._cells[_HOLD] = step + 1

    def release(self) -> None:
        """Let the worker go on. It doesn't wait again."""
        self._cells[_HOLD] = 0

    # ---- read by observers

    @property
    def rank(self) -> int:
        """Rank of the worker."""
        return self._cells[_RANK] - 1

    @property
    def host(self) -> int:
        """Number of the worker's host in the job."""
        return self._cells[_HOST] - 1

    @property
    def threads(self) -> int:
        """Number of threads that the launcher has given the worker."""
        return self._cells[_THREADS] - 1

    @property
    def pid(self) -> int:
        """Pid of the worker, which leads a process group of its own."""
        return self._cells[_PID] - 1

    @property
    def is_alive(self) -> bool:
        """Whether this process still exists, and not another with its pid. A zombie counts."""
        return self.pid > 0 and read_birth(self.pid) == self._cells[_BORN] - 1

    @property
    def began(self) -> float | None:
        """Time at which the worker's run began (`time.time()`). None before."""
        return (self._cells[_BEGAN] - 1) / 1e9 if self._cells[_BEGAN] else None

    @property
    def step(self) -> int:
        """Number of steps taken. -1 before the first one begins.

        It stays -1 for scripts that don't use paceline's loader.
        """
        return self._cells[_STEP] - 1

    @property
    def is_holding(self) -> bool:
        """Whether the worker waits at a breakpoint now, before step `step`."""
        return self._cells[_HOLDING] == 2
