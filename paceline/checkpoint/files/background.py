"""Writes a checkpoint in the background: in a thread with low priority, while training goes on."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

from paceline.errors import CheckpointError

LOWEST_PRIORITY = 19  # the lowest priority, as `nice` counts
ReportBytes = Callable[[int], None]  # is called with the number of bytes as they are written


class BackgroundWrite:
    """One write in a thread of its own. It begins at once.

    Args:
        what: Description of the write, for messages.
        nbytes: Bytes that will be written, for messages.
        write: Writes the checkpoint, and reports the bytes that are written.
        said: Called from the thread with a message if the write fails.
    """

    def __init__(
        self,
        what: str,
        nbytes: int,
        write: Callable[[ReportBytes], object],
        said: Callable[[str], None],
    ) -> None:
        self.nbytes = nbytes
        self.seconds = 0.0  # duration of the write, once it has ended
        self._description, self._write, self._report_error = what, write, said
        self._written_nbytes = 0
        self._error: CheckpointError | None = None
        self._is_written = False
        self._thread = threading.Thread(
            target=self._run_write, name="paceline checkpoint", daemon=True
        )
        self._thread.start()

    def _run_write(self) -> None:
        _lower_priority()
        began = time.perf_counter()
        try:
            self._write(self._count_bytes)
            self._is_written = True
        except CheckpointError as error:
            self._error = error
            self._report_error(
                f"{error}. The next save raises this error, or else the end of the run"
            )
        finally:
            self.seconds = time.perf_counter() - began

    def _count_bytes(self, nbytes: int) -> None:
        self._written_nbytes += nbytes

    def wait_until_ended(self, seconds: float) -> bool:
        """Wait at most this number of seconds. Tells whether the write has ended or failed."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def explain_failure(self) -> CheckpointError | None:
        """Make the error for a write that has failed or isn't over; None after a good write."""
        if self._thread.is_alive():
            written_megabytes, total_megabytes = self._written_nbytes / 1e6, self.nbytes / 1e6
            return CheckpointError(
                f"{self._description} was not on the disk in time: {written_megabytes:.1f} of "
                f"{total_megabytes:.1f} MB are written. Save less often, or raise "
                "start(deadline=seconds) if the disk is slow"
            )
        # Only `CheckpointError` is caught in the thread. Any other error is printed by Python.
        if self._error is None and not self._is_written:
            return CheckpointError(
                f"{self._description} was not saved: the thread that wrote it has ended; "
                "see the thread's own traceback"
            )
        return self._error


def _lower_priority() -> None:
    """Give this thread the lowest priority, so that training doesn't wait for it."""
    # Only Linux sets the priority of one thread. Other systems would set that of the process.
    if sys.platform == "linux":
        # Some sandboxes forbid it. The thread then competes with training on equal terms.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
