"""Workers on threads read torch's generator one at a time: before Python 3.12 they could deadlock.

Torch holds a lock of the generator as it makes the tensor with the state, which may be when Python
looks for garbage. If that calls Python code (finalizers, `gc.callbacks`), another thread may run,
which wants the generator and waits for it without letting any other thread run. Users have one
worker in a process, and don't meet this.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
from collections.abc import Callable

import torch

_READING = threading.Lock()
os.register_at_fork(
    before=_READING.acquire, after_in_parent=_READING.release, after_in_child=_READING.release
)  # no child finds it taken


@functools.wraps(torch.get_rng_state)
def get_rng_state(read: Callable[[], torch.Tensor] = torch.get_rng_state) -> torch.Tensor:
    """Read the state of torch's generator while Python doesn't look for garbage."""
    with _READING:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return read()
        finally:
            if enabled:
                gc.enable()


if sys.version_info < (3, 12):  # later versions look for garbage between two instructions alone
    torch.get_rng_state = torch.random.get_rng_state = get_rng_state
