"""Calls functions when the process that registered them exits, but not when a fork of it exits.

worker  call_at_exit(close) ------> exit: close()
   |
   +-- fork --> sys.exit()          Python's `atexit` would call `close` here too, and end
                                    connections and shared memory that the worker still uses
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from functools import partial


def call_at_exit(call: Callable[[], object]) -> Callable[[], None]:
    """Register a function to call when this process exits.

    Returns a function that takes the registration back.
    """
    # A fork inherits the handlers of `atexit`, and runs them too.
    process = os.getpid()

    def end() -> None:
        if os.getpid() == process:
            call()

    atexit.register(end)
    return partial(atexit.unregister, end)
