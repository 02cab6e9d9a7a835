"""The end of a job that was asked to end: one line replaces the tracebacks of its workers.

All workers then get SIGINT. Unless the script catches it, it raises `KeyboardInterrupt` wherever
the worker was, and each worker prints a traceback that tells nothing.
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
from paceline.cluster.launcher.last_words import extract_error_lines
from paceline.cluster.launcher.worker import WorkerProcess
from paceline.formatting import format_count

_CHECKPOINT_FOLDER, _LIVE_FILE = "checkpoints", "live.json"  # in the folder of a run
_SURVIVAL_ADVICE: Final = (
    "--restarts N would start all again from a checkpoint, --min-workers N has the others go on "
    "without a lost one"
)
_MOST_REASON_CHARACTERS: Final = 300  # characters of the reason of a failure


class JobEnd:
    """What is shown of the end of a job, whose workers on this host are these."""

    def __init__(self, workers: Sequence[WorkerProcess]) -> None:
        self._workers = workers
        self._signum: int | None = None
        self._folder: Path | None = None

    def note_folder(self, folder: Path) -> None:
        """Note the folder of the run, which one of the workers writes."""
        self._folder = folder

    def note_signal(self, signum: int) -> None:
        """Note that this signal asks the job to end.

        From now on the workers' tracebacks of the interrupt are left out of their output.
        """
        self._signum = signum
        for worker in self._workers:
            worker.streams[1].hush_interrupts()

    @property
    def last_line(self) -> str | None:
        """Last line of the launcher; None if no end was asked for, or if its output is closed."""
        if self._signum is None or self._signum == signal.SIGPIPE:
            return None
        cause = describe_signal(self._signum)
        if not self._workers:
            return f"paceline: {cause} before its workers started"
        # The line tells how many workers didn't end by themselves.
        killed = sum(signal.SIGKILL in worker.sent_signals for worker in self._workers)
        by_force = f" ({killed} by SIGKILL)" if killed else ""
        ended_workers = f"{format_count(len(self._workers), 'worker')} ended{by_force}"
        folder = "" if self._folder is None else f"; {_describe_folder(self._folder)}"
        return f"paceline: {cause}: {ended_workers}{folder}"

    def note_failure(self, failure: Failure, *, alone: bool) -> str:
        """Describe what is left after this failure, and note the failure in the run's folder.

        `alone`: the job has no option by which it would survive a lost worker.
        """
        if self._folder is None:
            return ""
        errors = extract_error_lines(failure.tail)
        summary = failure.summary_line().removeprefix("paceline: ")
        _note_reason(
            self._folder,
            f"rank {failure.rank} on {failure.host}: {errors[0]}" if errors else summary,
        )
        return "; ".join(
            [
                _describe_folder(self._folder),
                *([_SURVIVAL_ADVICE] if alone and failure.code > 128 else []),
            ]
        )


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Let signals that ask for the end of the job raise `JobStopped`.

    It is used while there is no supervisor to handle signals. The error makes this launcher tell
    the other hosts.
    """

    def stop(signum: int, frame: object) -> None:
        raise JobStopped(signum, socket.gethostname(), here=True)

    old_handlers = {
        signum: signal.signal(signum, stop)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for signum, old_handler in old_handlers.items():
            signal.signal(signum, old_handler)


def describe_signal(signum: int) -> str:
    """The signal by which a job was asked to end, in words."""
    return (
        "interrupted"
        if signum == signal.SIGINT
        else f"asked to end by {signal.Signals(signum).name}"
    )


def _describe_folder(folder: Path) -> str:
    """Describe where the run is, and how to go on from there."""
    shortened = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    has_checkpoint = any((folder / _CHECKPOINT_FOLDER).glob("step-*"))
    return f"the run is in {shortened}" + (
        f', and run.resume("{shortened}") goes on from its newest checkpoint'
        if has_checkpoint
        else ", without a checkpoint"
    )


def _note_reason(folder: Path, reason: str) -> None:
    """Write the reason of a failure into the run's folder.

    The worker that writes there may have been killed, or may know only that another worker is gone.
    """
    path = folder / _LIVE_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content["live"] |= {"state": "failed", "why": reason[:_MOST_REASON_CHARACTERS]}
        # Readers see the old file or the new one, never a part.
        temporary = path.with_name(f".{_LIVE_FILE}.{os.getpid()}")
        with temporary.open("x", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")
        temporary.replace(path)
    except (OSError, ValueError, KeyError, TypeError):
        # The run has ended well, or its folder can't be written. Only the reason is missing then.
        return
