"""Events that a worker reports to its launcher, as lines of JSON in a pipe.

joined ... closed            the worker took part, and ended in good order
joined ... failed            it ended with an error, whose type and message it reports
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import time
from typing import Any

from paceline.cluster.control.commands import STACK
from paceline.cluster.discover import Place
from paceline.errors import (
    DeadlineExceeded,
    Mismatch,
    ReplicasDiffer,
    UsageError,
    ViewChanged,
    WorkerLost,
)
from paceline.formatting import message

# Errors that follow from the failure of another worker. They count as the cause only if there is no
# other error.
ECHOES = (Mismatch, WorkerLost, DeadlineExceeded, ViewChanged)
# Errors that another start of the job would meet again, or would hide.
FINAL = (UsageError, Mismatch, ReplicasDiffer)
# Characters of a message. A record stays below PIPE_BUF, so that the kernel writes it in one piece.
_LONGEST = 300


def joined(place: Place) -> None:
    """Report that this worker takes part from now on.

    If it ends without `report_closed`, it has failed, even with exit code 0.
    """
    _tell(place, {"event": "joined"})


def closed(place: Place) -> None:
    """Report that this worker has left in good order."""
    _tell(place, {"event": "closed"})


def opened(place: Place, folder: str, seed: int, began: float) -> None:
    """Report the run's folder, seed and begin, for later workers and other starts of the job."""
    if place.worker is not None or place.job_start is not None:
        _tell(place, {"event": "opened", "folder": folder, "seed": seed, "began": began})


def writes(place: Place, folder: str) -> None:
    """Report that this worker writes the run's folder from now on."""
    _tell(place, {"event": "writes", "folder": folder})


def surviving(place: Place) -> None:
    """Report that the other workers can go on without this one from now on."""
    _tell(place, {"event": "surviving"})


def ready(place: Place) -> None:
    """Report that this worker is ready to take part, and waits to be admitted."""
    _tell(place, {"event": "ready"})


def broken(place: Place, view: int) -> None:
    """Report that connections broke, so that another view is needed.

    As far as this worker can tell, all members of the view are alive.
    """
    _tell(place, {"event": "broken", "view": view})


def left(place: Place) -> None:
    """Report that this worker leaves between two turns, as its launcher has asked.

    The other workers go on without it.
    """
    _tell(place, {"event": "left"})


def show(place: Place) -> None:
    """Write the stack of the main thread whenever `commands.STACK_SIGNAL` comes, and report so.

    It works wherever the worker hangs. A script's own handler of that signal stays. Other threads
    are left out: if there are many, faulthandler omits the oldest ones, and so the main thread.
    """
    if place.stack_fd is not None and signal.getsignal(STACK) is signal.SIG_DFL:
        faulthandler.register(STACK, file=place.stack_fd, all_threads=False, chain=False)
        _tell(place, {"event": "shows"})


def late(place: Place, call: int, what: str, *, given_up: bool) -> None:
    """Report that this worker waits for others far longer than usual.

    Args:
        place: Place of this worker.
        call: Number of calls that it has completed. It waits in the next one.
        what: Description of the wait.
        given_up: Whether its deadline is about to pass.
    """
    _tell(place, {"event": "late", "call": call, "what": what, "given_up": given_up})


def where(place: Place, call: int, what: str, seconds: float, *, waits: bool) -> None:
    """Report the position of this worker in its calls.

    Args:
        place: Place of this worker.
        call: Number of calls that it has completed.
        what: Description of the current wait, or of the last one.
        seconds: Time since the last call ended.
        waits: Whether it waits in the next call.
    """
    _tell(place, {"event": "where", "call": call, "what": what, "seconds": seconds, "waits": waits})


def progress(place: Place, status: dict[str, Any] | None) -> None:
    """Report the progress of the run, as fields of `RunStatus`. None: there is no more.

    Never waits. The report is dropped if the launcher doesn't read, for instance because it was
    stopped at a terminal, or if it is too long to be written in one piece.
    """
    _tell(place, {"event": "progress", "status": status}, waits=False)


def report_failure(
    place: Place, kind: type[BaseException], error: BaseException | None = None
) -> None:
    """Report the uncaught exception that ends this worker.

    Called as soon as the error is known, before other workers can notice that this one is gone.
    """
    if issubclass(kind, KeyboardInterrupt) or leaves_well(error):
        return
    lines = message(error)
    code = error.code & 0xFF if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    record = {
        "event": "failed",
        "type": kind.__name__,
        "message": "\n".join(lines)[:_LONGEST],
        "more": len(lines) - 1,
        "code": code,
    }
    _tell(
        place, {**record, "is_echo": issubclass(kind, ECHOES), "is_final": issubclass(kind, FINAL)}
    )


def leaves_well(error: BaseException | None) -> bool:
    """Whether an error ends a script early without a failure: `sys.exit()`, `sys.exit(0)`."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _tell(place: Place, record: dict[str, object], *, waits: bool = True) -> None:
    """Write a record to the launcher. Without `waits` it is dropped if the pipe is full."""
    if place.report_fd is None:
        return
    line = (json.dumps({"rank": place.rank, "time": time.time(), **record}) + "\n").encode()
    try:
        if waits or (len(line) <= select.PIPE_BUF and _has_room(place.report_fd)):
            os.write(place.report_fd, line)
    except OSError:
        # The launcher is gone, or this is a child of a worker, without its descriptors.
        return


def _has_room(descriptor: int) -> bool:
    """Whether a record can be written to a pipe at once."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(events & select.POLLOUT for _, events in poll.poll(0))
