"""Calls at the exit of the process that asked for them, and not of those that it forks.

worker  at_exit(close) ------------------------> exit: close()
   |
   +-- fork --> sys.exit()                       Python calls what the worker has registered here,
                                                 too: the connections
                                                 and the shared memory that `close` would end are
                                                 the worker's
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
