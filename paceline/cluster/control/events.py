"""Events that a worker reports to its launcher: that it joined, that it closed in good order, or
what it failed of.
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

# What a worker raises because another one failed: never the cause while something else could be.
ECHOES = (Mismatch, WorkerLost, DeadlineExceeded, ViewChanged)
# what another start of the job would come to again, or would hide
FINAL = (UsageError, Mismatch, ReplicasDiffer)
# characters of a message: a record stays below PIPE_BUF, so that it is written whole
_LONGEST = 300


def joined(place: Place) -> None:
    """Report that this worker takes part from now on: leaving before `closed` is a failure, with
    exit code 0 too.
    """
    _tell(place, {"event": "joined"})


def closed(place: Place) -> None:
    """Report that this worker has left in good order."""
    _tell(place, {"event": "closed"})


def opened(place: Place, folder: str, seed: int, began: float) -> None:
    """Report the run's folder, its seed and when it began, for workers that come later and for
    another start of the job.
    """
    if place.worker is not None or place.job_start is not None:
        _tell(place, {"event": "opened", "folder": folder, "seed": seed, "began": began})


def writes(place: Place, folder: str) -> None:
    """Report that this worker writes the run's folder from now on."""
    _tell(place, {"event": "writes", "folder": folder})


def surviving(place: Place) -> None:
    """Report that from now on the others can go on without this worker."""
    _tell(place, {"event": "surviving"})


def ready(place: Place) -> None:
    """Report that this worker has everything that it needs to take part, and waits for being let
    in.
    """
    _tell(place, {"event": "ready"})


def broken(place: Place, view: int) -> None:
    """Report that connections broke in a view whose members live, as far as this worker knows:
    another view is needed.
    """
    _tell(place, {"event": "broken", "view": view})


def left(place: Place) -> None:
    """Report that this worker leaves between two turns, as its launcher has asked; the others go
    on without it.
    """
    _tell(place, {"event": "left"})


def show(place: Place) -> None:
    """Let this worker write what its main thread does when asked to (`commands.STACK`), wherever it
    hangs; and report that it can.

    A script's own handler of that signal stays. Only the main thread: of many threads faulthandler
    leaves out the oldest.
    """
    if place.stack_fd is not None and signal.getsignal(STACK) is signal.SIG_DFL:
        faulthandler.register(STACK, file=place.stack_fd, all_threads=False, chain=False)
        _tell(place, {"event": "shows"})


def late(place: Place, call: int, what: str, *, given_up: bool) -> None:
    """Report that this worker waits for others, in the call after `call`, far longer than ever;
    or so long that they are given up.
    """
    _tell(place, {"event": "late", "call": call, "what": what, "given_up": given_up})


def where(place: Place, call: int, what: str, seconds: float, *, waits: bool) -> None:
    """Report how many calls this worker has completed, the last of them how long ago, and
    whether it waits in the next one.
    """
    _tell(place, {"event": "where", "call": call, "what": what, "seconds": seconds, "waits": waits})


def progress(place: Place, status: dict[str, Any] | None) -> None:
    """Report how far the run is, as fields of `paceline.status.run_status.RunStatus`, or None after
    the last time. Never waits.

    It is left out where the launcher doesn't read, as one that was stopped at a terminal, and where
    it is too long to be written whole.
    """
    _tell(place, {"event": "progress", "status": status}, waits=False)


def report_failure(
    place: Place, kind: type[BaseException], error: BaseException | None = None
) -> None:
    """Report the uncaught exception that ends this worker; call it as soon as the error is
    known, before peers can notice.
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
    """Whether this is how a script ends early without a failure: `sys.exit()`, `sys.exit(0)`."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _tell(place: Place, record: dict[str, object], *, waits: bool = True) -> None:
    if place.report_fd is None:
        return
    line = (json.dumps({"rank": place.rank, "time": time.time(), **record}) + "\n").encode()
    try:
        if waits or (len(line) <= select.PIPE_BUF and _has_room(place.report_fd)):
            os.write(place.report_fd, line)
    except OSError:
        # The launcher is gone, or this is a child of a worker, without its descriptors: nobody is
        # left to report to.
        return


def _has_room(descriptor: int) -> bool:
    """Whether a record can be written to a pipe at once."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(found & select.POLLOUT for _, found in poll.poll(0))
