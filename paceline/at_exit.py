"""Calls at the exit of the process that registered them, and not at the exit of its forks.

worker  at_exit(close) -----------> exit: close()
   |
   +-- fork --> sys.exit()          Python would call the registered function here, too: the
                                    connections and shared memory that `close` ends are the worker's
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from functools import partial


def at_exit(call: Callable[[], object]) -> Callable[[], None]:
    """Have `call` called when this process exits; returns what takes that back."""
    process = os.getpid()

    def end() -> None:
        if os.getpid() == process:
            call()

    atexit.register(end)
    return partial(atexit.unregister, end)
