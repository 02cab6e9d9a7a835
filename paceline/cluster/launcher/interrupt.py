"""The end of a job that was asked to end: one line of the launcher's, in place of its workers'
tracebacks of the interrupt.

All workers get SIGINT then, and what a script doesn't catch is a `KeyboardInterrupt` wherever it
was: that says nothing, many times.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from paceline.cluster.hosts.peers import Failure
from paceline.cluster.hosts.restart_messages import JobStopped
from paceline.cluster.launcher.last_words import error_lines
from paceline.cluster.launcher.worker import WorkerProcess
from paceline.formatting import counted

_CHECKPOINTS, _LIVE = "checkpoints", "live.json"  # in the folder of a run
_SURVIVAL: Final = (
    "--restarts N would start all again from a checkpoint, --min-workers N has the others go on "
    "without a lost one"
)
_LONGEST: Final = 300  # characters of the reason of a failure


class JobEnd:
    """What is shown of the end of these workers, once it has been asked for."""

    def __init__(self, workers: Sequence[WorkerProcess]) -> None:
        self._workers = workers
        self._signum: int | None = None
        self._folder: Path | None = None

    def follow(self, folder: Path) -> None:
        """Note the folder of the run, which one of them writes."""
        self._folder = folder

    def ask(self, signum: int) -> None:
        """Leave out what workers say of the interrupt that they get now, as the job was asked by
        a signal to end.
        """
        self._signum = signum
        for worker in self._workers:
            worker.streams[1].hush_interrupts()

    @property
    def line(self) -> str | None:
        """The launcher's own last line; None where the end wasn't asked for, or where nobody
        reads any more.
        """
        if self._signum is None or self._signum == signal.SIGPIPE:
            return None
        asked = words(self._signum)
        if not self._workers:
            return f"paceline: {asked} before its workers started"
        killed = sum(signal.SIGKILL in worker.was_sent for worker in self._workers)
        by_force = f" ({killed} by SIGKILL)" if killed else ""
        ended = f"{counted(len(self._workers), 'worker')} ended{by_force}"
        return (
            f"paceline: {asked}: "
            f"{ended}{'' if self._folder is None else f'; {_where(self._folder)}'}"
        )

    def left(self, failure: Failure, *, alone: bool) -> str:
        """Say what this failure has left, and note it in the run's folder.

        `alone`: nothing was asked for that survives a lost worker.
        """
        if self._folder is None:
            return ""
        errors = error_lines(failure.tail)
        words = failure.line().removeprefix("paceline: ")
        _note(
            self._folder, f"rank {failure.rank} on {failure.host}: {errors[0]}" if errors else words
        )
        return "; ".join(
            [_where(self._folder), *([_SURVIVAL] if alone and failure.code > 128 else [])]
        )


@contextmanager
def stoppable() -> Iterator[None]:
    """Have signals that ask for the end of the job raise `JobStopped` where no supervisor
    handles them: other hosts are told.
    """

    def stop(signum: int, frame: object) -> None:
        raise JobStopped(signum, socket.gethostname(), here=True)

    before = {
        signum: signal.signal(signum, stop)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def words(signum: int) -> str:
    """Say by which signal a job was asked to end."""
    return (
        "interrupted"
        if signum == signal.SIGINT
        else f"asked to end by {signal.Signals(signum).name}"
    )


def _where(folder: Path) -> str:
    """Name the folder of a run, and how to go on from there."""
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    saved = any((folder / _CHECKPOINTS).glob("step-*"))
    return f"the run is in {shown}" + (
        f', and run.resume("{shown}") goes on from its newest checkpoint'
        if saved
        else ", without a checkpoint"
    )


def _note(folder: Path, why: str) -> None:
    """Leave in the folder of a run why it has failed: who wrote it was killed, or knows only
    that another worker has gone.
    """
    path = folder / _LIVE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        found["live"] |= {"state": "failed", "why": why[:_LONGEST]}
        whole = path.with_name(f".{_LIVE}.{os.getpid()}")
        with whole.open("x", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        whole.replace(path)
    except (OSError, ValueError, KeyError, TypeError):
        # the run has ended well, or its folder can't be written: then nothing is lost but the
        # reason
        return
