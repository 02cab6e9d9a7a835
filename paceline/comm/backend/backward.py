"""Backward passes in which operations begin: what is left to the end of a pass, and whether the
thread of one still computes.

    thread of the pass    backward: bucket 0 begun . bucket 1 begun . bucket 2 begun | their ends,
                          in order | what waits for them (DDP)

Where every core has a worker that computes, a thread beside would only take turns with that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from torch.autograd import Variable

# seconds without a use of the processor after which a thread is taken to wait for something
REST = 20e-3


def inside() -> bool:
    """Whether this thread is in a backward pass."""
    return torch._C._current_graph_task_id() != -1


def at_end(act: Callable[[], None]) -> None:
    """Call `act` in this thread once its backward pass has been through the graph, after what
    was asked for earlier.
    """
    Variable._execution_engine.queue_callback(act)


class PassThread:
    """The thread that this is made in, seen from others."""

    def __init__(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._used, self._at = time.clock_gettime(self._clock), time.monotonic()

    def computes(self) -> bool:
        """Whether the thread has used the processor of late; False once it has ended."""
        try:
            used = time.clock_gettime(self._clock)
        except OSError:
            return False
        now = time.monotonic()
        if used > self._used:
            self._used, self._at = used, now
        return now - self._at < REST
