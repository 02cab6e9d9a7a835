"""Runs a function in a forked copy of this process, and passes only its error back.

So its side effects don't stay in this process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from paceline.cluster.launcher.worker import make_preparation
from paceline.errors import PacelineError


class AttemptFailed(PacelineError):
    """The function has raised an error of paceline. `kind` is the name of its class."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def attempt_in_copy(do: Callable[[], object]) -> None:
    """Call `do` in a copy of this process, which must have one thread only.

    Raises `AttemptFailed` if `do` raises an error of paceline.
    """
    reader, writer = os.pipe()
    prepare = make_preparation(os.getpid())
    process = os.fork()
    if process == 0:
        try:
            os.close(reader)
            if prepare is not None:
                prepare()
            _write_error(writer, do)
        finally:
            # In any case the copy must end here, and never go on as this process would.
            os._exit(0)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as pipe:
            reply = pipe.read()
    finally:
        os.waitpid(process, 0)
    if reply:
        raise AttemptFailed(*json.loads(reply))


def _write_error(writer: int, do: Callable[[], object]) -> None:
    """Call `do`, and write its error to the pipe."""
    try:
        do()
    except PacelineError as error:
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(json.dumps([type(error).__name__, str(error)]).encode())
