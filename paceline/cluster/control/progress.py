"""The progress page of a worker, for observers outside: a few numbers in a mapped file, with a
breakpoint before a step.

    launcher   who: rank, host, pid, threads ---+
    session    where: began, step, holding -----+--> FOLDER/rank-N (mapped by all three)
    watcher    hold: the step to wait before ---+

Each number has one writer. A page may be there before its worker is: a watcher that writes `hold`
into it first misses no step. `paceline run` makes a page for each of its workers where
PACELINE_PROGRESS names a folder; a step costs two accesses to memory then.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from pathlib import Path
from typing import Final

from paceline.errors import DeadlineExceeded, ResourceError

_POLL_SECONDS = 0.001  # a worker that waits looks this often whether it may go on
_SILENT_SECONDS = 1.0  # a wait that is longer is announced
# 64-bit numbers, each plus one: 0 is "unset"
_RANK, _HOST, _THREADS, _PID, _BORN, _BEGAN, _STEP, _HOLD, _HOLDING = range(9)
_NBYTES: Final = 8 * 9


def path(folder: str | Path, rank: int) -> Path:
    """Return the file of the page of this rank's worker."""
    return Path(folder) / f"rank-{rank}"


def birth(pid: int) -> int | None:
    """Return when a process was started, in the kernel's ticks since boot: with its number
    unique for ever. None: it is gone.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def enter(file: str | None, began: float, *, deadline: float) -> Page | None:
    """Open the page that this worker was given, if any: its run began at this `time.time()`, and
    no wait lasts longer than `deadline`.
    """
    if file is None:
        return None
    page = Page(Path(file), deadline=deadline)
    page.joined(began)
    return page


def wrote_to(file: Path) -> Path | None:
    """Return the run folder of the worker with this page; None if it had none."""
    return Path(_beside(file).read_text(encoding="utf-8")) if _beside(file).exists() else None


def _beside(page: Path) -> Path:
    return page.with_name(f"{page.name}.folder")


class Page:
    """The page of one worker. Numbers that nobody has written yet read as -1.

    `deadline` is how long (seconds) a worker waits at a breakpoint.
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
                "let PACELINE_PROGRESS name a folder that is there and can be written, or unset it"
            ) from error
        self._cells = memoryview(self._memory).cast("q")

    def close(self) -> None:
        """Unmap the file. Calling it twice is harmless."""
        self._cells.release()
        self._memory.close()

    # ---- written by the launcher

    def describe(self, rank: int, host: int, threads: int) -> None:
        """Write the rank of a worker about to be started, the number of its host in the job, and
        its threads. `hold` stays.
        """
        for cell in (_PID, _BORN, _BEGAN, _STEP, _HOLDING):
            self._cells[cell] = 0
        self._cells[_RANK], self._cells[_HOST], self._cells[_THREADS] = (
            rank + 1,
            host + 1,
            threads + 1,
        )

    def started(self, pid: int) -> None:
        """Write the number of the worker's process."""
        born = birth(pid)
        self._cells[_BORN] = 0 if born is None else born + 1
        self._cells[_PID] = pid + 1

    # ---- written by the worker

    def joined(self, began: float) -> None:
        """Write the `time.time()` at which the worker's run began."""
        self._cells[_BEGAN] = int(began * 1e9) + 1

    def writes_to(self, folder: Path) -> None:
        """Write the folder of the worker's run; `wrote_to` gives it, also when the run is over."""
        _beside(self.file).write_text(str(folder.absolute()), encoding="utf-8")

    def reach(self, step: int) -> float:
        """Write that this many steps are taken and the next is about to begin; wait here if asked
        to. Returns the seconds spent waiting.

        Raises `DeadlineExceeded` when nobody lets the worker go on.
        """
        cells = self._cells
        cells[_STEP] = step + 1
        return self._wait(step) if 0 < cells[_HOLD] <= step + 1 else 0.0

    def passed(self, step: int) -> None:
        """Write that this many steps are taken."""
        self._cells[_STEP] = step + 1

    def _wait(self, step: int) -> float:
        cells, began, said = self._cells, time.monotonic(), False
        cells[_HOLDING] = 2
        try:
            while 0 < cells[_HOLD] <= step + 1:
                waited = time.monotonic() - began
                if waited > _SILENT_SECONDS and not said:
                    said = True
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
                        f"{self.file}, and nobody let it go on; "
                        "whoever holds a worker has to call release() on its page"
                    )
                time.sleep(_POLL_SECONDS)
        finally:
            cells[_HOLDING] = 1
        return time.monotonic() - began

    # ---- written by observers

    def hold(self, step: int) -> None:
        """Let the worker wait before it begins this step (counted from 0), or the next it comes
        to if it is past that.
        """
        self._cells[_HOLD] = step + 1

    def release(self) -> None:
        """Let the worker go on, and wait nowhere."""
        self._cells[_HOLD] = 0

    # ---- read by observers

    @property
    def rank(self) -> int:
        """The worker's rank."""
        return self._cells[_RANK] - 1

    @property
    def host(self) -> int:
        """The number of the worker's host in the job."""
        return self._cells[_HOST] - 1

    @property
    def threads(self) -> int:
        """How many threads the launcher has given the worker."""
        return self._cells[_THREADS] - 1

    @property
    def pid(self) -> int:
        """The worker's process, which leads a process group of its own."""
        return self._cells[_PID] - 1

    @property
    def alive(self) -> bool:
        """Whether that very process is still there (a zombie is)."""
        return self.pid > 0 and birth(self.pid) == self._cells[_BORN] - 1

    @property
    def began(self) -> float | None:
        """When the worker's run began (`time.time()`); None before."""
        return (self._cells[_BEGAN] - 1) / 1e9 if self._cells[_BEGAN] else None

    @property
    def step(self) -> int:
        """Steps taken; -1 before the first is begun, and for scripts that don't use paceline's
        loader.
        """
        return self._cells[_STEP] - 1

    @property
    def holding(self) -> bool:
        """Whether the worker waits at a breakpoint now, before step `step`."""
        return self._cells[_HOLDING] == 2
