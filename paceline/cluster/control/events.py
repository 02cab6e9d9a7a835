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

from paceline.cluster.control.commands import STACK_SIGNAL
from paceline.cluster.discover import Place
from paceline.errors import (
    DeadlineExceeded,
    Mismatch,
    ReplicasDiffer,
    UsageError,
    ViewChanged,
    WorkerLost,
)
from paceline.formatting import list_message_lines

# Errors that follow from the failure of another worker. They count as the cause only if there is no
# other error.
ECHO_ERRORS = (Mismatch, WorkerLost, DeadlineExceeded, ViewChanged)
# Errors that another start of the job would meet again, or would hide.
FINAL_ERRORS = (UsageError, Mismatch, ReplicasDiffer)
# Characters of a message. A record stays below PIPE_BUF, so that the kernel writes it in one piece.
_MAX_MESSAGE_CHARACTERS = 300


def report_joined(place: Place) -> None:
    """Report that this worker takes part from now on.

    If it ends without `report_closed`, it has failed, even with exit code 0.
    """
    _write_record(place, {"event": "joined"})


def report_closed(place: Place) -> None:
    """Report that this worker has left in good order."""
    _write_record(place, {"event": "closed"})


def report_run_folder(place: Place, folder: str, seed: int, began: float) -> None:
    """Report the run's folder, seed and begin, for later workers and other starts of the job."""
    if place.worker is not None or place.job_start is not None:
        _write_record(place, {"event": "opened", "folder": folder, "seed": seed, "began": began})


def report_writer(place: Place, folder: str) -> None:
    """Report that this worker writes the run's folder from now on."""
    _write_record(place, {"event": "writes", "folder": folder})


def report_surviving(place: Place) -> None:
    """Report that the other workers can go on without this one from now on."""
    _write_record(place, {"event": "surviving"})


def report_ready(place: Place) -> None:
    """Report that this worker is ready to take part, and waits to be admitted."""
    _write_record(place, {"event": "ready"})


def report_saving(place: Place) -> None:
    """Report that this worker saves a checkpoint if it is asked to end, from now on."""
    _write_record(place, {"event": "saves"})


def report_broken_view(place: Place, view: int) -> None:
    """Report that connections broke, so that another view is needed.

    As far as this worker can tell, all members of the view are alive.
    """
    _write_record(place, {"event": "broken", "view": view})


def report_leaving(place: Place) -> None:
    """Report that this worker leaves between two turns, as its launcher has asked.

    The other workers go on without it.
    """
    _write_record(place, {"event": "left"})


def register_stack_dump(place: Place) -> None:
    """Write the stack of the main thread whenever `commands.STACK_SIGNAL` comes, and report so.

    It works wherever the worker hangs. A script's own handler of that signal stays. Other threads
    are left out: if there are many, faulthandler omits the oldest ones, and so the main thread.
    """
    if place.stack_fd is not None and signal.getsignal(STACK_SIGNAL) is signal.SIG_DFL:
        faulthandler.register(STACK_SIGNAL, file=place.stack_fd, all_threads=False, chain=False)
        _write_record(place, {"event": "shows"})


def report_late_wait(place: Place, call: int, what: str, *, given_up: bool) -> None:
    """Report that this worker waits for others far longer than usual.

    Args:
        place: Place of this worker.
        call: Number of calls that it has completed. It waits in the next one.
        what: Description of the wait.
        given_up: Whether its deadline is about to pass.
    """
    _write_record(place, {"event": "late", "call": call, "what": what, "given_up": given_up})


def report_position(place: Place, call: int, what: str, seconds: float, *, waits: bool) -> None:
    """Report the position of this worker in its calls.

    Args:
        place: Place of this worker.
        call: Number of calls that it has completed.
        what: Description of the current wait, or of the last one.
        seconds: Time since the last call ended.
        waits: Whether it waits in the next call.
    """
    _write_record(
        place, {"event": "where", "call": call, "what": what, "seconds": seconds, "waits": waits}
    )


def report_progress(place: Place, status: dict[str, Any] | None) -> None:
    """Report the progress of the run, as fields of `RunStatus`. None: there is no more.

    Never waits. The report is dropped if the launcher doesn't read, for instance because it was
    stopped at a terminal, or if it is too long to be written in one piece.
    """
    _write_record(place, {"event": "progress", "status": status}, waits=False)


def report_failure(
    place: Place, kind: type[BaseException], error: BaseException | None = None
) -> None:
    """Report the uncaught exception that ends this worker.

    Called as soon as the error is known, before other workers can notice that this one is gone.
    """
    if issubclass(kind, KeyboardInterrupt) or is_regular_exit(error):
        return
    lines = list_message_lines(error)
    code = error.code & 0xFF if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    record = {
        "event": "failed",
        "type": kind.__name__,
        "message": "\n".join(lines)[:_MAX_MESSAGE_CHARACTERS],
        "more": len(lines) - 1,
        "code": code,
    }
    _write_record(
        place,
        {
            **record,
            "is_echo": issubclass(kind, ECHO_ERRORS),
            "is_final": issubclass(kind, FINAL_ERRORS),
        },
    )


def is_regular_exit(error: BaseException | None) -> bool:
    """Whether an error ends a script early without a failure: `sys.exit()`, `sys.exit(0)`."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _write_record(place: Place, record: dict[str, object], *, waits: bool = True) -> None:
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
