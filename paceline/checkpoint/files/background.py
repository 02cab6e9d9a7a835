"""Background checkpoint writes: a thread writes while training goes on, in spare time."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

from paceline.errors import CheckpointError

LOWEST = 19  # as `nice` counts
Moved = Callable[[int], None]  # gets the number of bytes, as they are written


class BackgroundWrite:
    """One write, under way from now on: `write`, in a thread of its own.

    `said` is called at once with a failure.

    `what` and `nbytes` describe the write in messages.
    """

    def __init__(
        self, what: str, nbytes: int, write: Callable[[Moved], object], said: Callable[[str], None]
    ) -> None:
        self.nbytes = nbytes
        self.seconds = 0.0  # that the write took, once it has ended
        self._what, self._write, self._said = what, write, said
        self._moved = 0
        self._error: CheckpointError | None = None
        self._whole = False
        self._thread = threading.Thread(target=self._run, name="paceline checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        _give_way()
        began = time.perf_counter()
        try:
            self._write(self._count)
            self._whole = True
        except CheckpointError as error:
            self._error = error
            self._said(f"{error}. The next save raises this, at the latest the end of the run")
        finally:
            self.seconds = time.perf_counter() - began

    def _count(self, nbytes: int) -> None:
        self._moved += nbytes

    def wait(self, seconds: float) -> bool:
        """Whether the write ends, well or not, within this number of seconds."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def failure(self) -> CheckpointError | None:
        """Reason why the checkpoint isn't there (yet)."""
        if self._thread.is_alive():
            done, whole = self._moved / 1e6, self.nbytes / 1e6
            return CheckpointError(
                f"{self._what} has not come to the disk in time: {done:.1f} of {whole:.1f} MB are "
                "written. Save less often, or raise "
                "start(deadline=seconds) for a disk that is so slow"
            )
        if self._error is None and not self._whole:
            return CheckpointError(
                f"{self._what} was not saved: the thread that wrote it has ended; "
                "its own traceback says more"
            )
        return self._error


def _give_way() -> None:
    """Let this thread run only when no other one wants the processor, as training must not wait."""
    if sys.platform == "linux":  # elsewhere it would be the whole process
        # not in every sandbox; it is as quick as the others then
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
