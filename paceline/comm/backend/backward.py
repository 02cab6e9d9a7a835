"""Finds the backward pass in which an operation begins, and leaves work to the end of the pass.

    thread of the pass   backward: begin 0 . begin 1 . begin 2 | end 0, 1, 2 | DDP waits for them

If every core has a worker that computes, a second thread would only take turns with that worker.
So operations that begin in a pass end in its own thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from torch.autograd import Variable

REST = 20e-3  # seconds without processor time after which a thread is taken to be waiting


def is_inside_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    # Private to torch, though fully_shard uses it as well: the id of the pass that runs in this
    # thread, -1 outside of one. Without it operations would have to end in the background.
    return torch._C._current_graph_task_id() != -1


def call_at_end(act: Callable[[], None]) -> None:
    """Call `act` in this thread at the end of its backward pass, after earlier callbacks."""
    # Private to torch, though FSDP uses it as well. It raises if no pass runs in this thread.
    Variable._execution_engine.queue_callback(act)


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
