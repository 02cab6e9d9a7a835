"""The thread of a backward pass, in which an operation that begins in the pass ends.

    thread of the pass   backward: begin 0 . begin 1 . begin 2 | end 0, 1, 2 | DDP waits for them

If every core has a worker that computes, a second thread would only take turns with that worker.
So operations that begin in a pass end in its own thread.
"""

from __future__ import annotations

import threading
import time

REST = 20e-3  # seconds without processor time after which a thread is taken to be waiting


class PassThread:
    """The thread in which this object was made, for questions from other threads."""

    def __init__(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._used, self._at = time.clock_gettime(self._clock), time.monotonic()

    def is_computing(self) -> bool:
        """Whether the thread has used the processor lately. False once it has ended."""
        try:
            used = time.clock_gettime(self._clock)
        except OSError:
            return False
        now = time.monotonic()
        if used > self._used:
            self._used, self._at = used, now
        return now - self._at < REST
