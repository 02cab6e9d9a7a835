"""Runs a function in a forked copy of this process, for side effects that this one shouldn't
keep; only an error comes back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from paceline.cluster.launcher.worker import preparation
from paceline.errors import PacelineError


class AttemptFailed(PacelineError):
    """The attempted function has raised an error of ours; `kind` is its class."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def attempt(do: Callable[[], object]) -> None:
    """Call `do` in a copy of this process, which has one thread.

    Raises `AttemptFailed` if `do` raises an error of ours.
    """
    reader, writer = os.pipe()
    prepare = preparation(os.getpid())
    process = os.fork()
    if process == 0:
        try:
            os.close(reader)
            if prepare is not None:
                prepare()
            _tell(writer, do)
        finally:
            os._exit(0)  # whatever happens: it must never go on as what it is a copy of
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as pipe:
            said = pipe.read()
    finally:
        os.waitpid(process, 0)
    if said:
        raise AttemptFailed(*json.loads(said))


def _tell(writer: int, do: Callable[[], object]) -> None:
    try:
        do()
    except PacelineError as error:
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(json.dumps([type(error).__name__, str(error)]).encode())
