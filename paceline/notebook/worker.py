"""The program of a worker of `pl.launch`: calls the function, and sends back its result or error.

worker --> caller    "called"    it has started
                     "result"    the returned value, or
                     "failed"    the traceback
"""

from __future__ import annotations

import linecache
import sys
import traceback
from functools import partial
from types import TracebackType

from paceline import callsite
from paceline.cluster.control import events
from paceline.cluster.control.calls import CallChannel
from paceline.cluster.discover import CallPlace, Place, discover_place
from paceline.notebook import packing
from paceline.session.excepthook import BRIEF_ERRORS, format_briefly


def main() -> None:
    """Call the function, and send its result to the caller.

    An exception in the function ends this process as it would end a script, and is also sent to
    the caller.
    """
    place = discover_place()
    call = place.call
    assert call is not None, "only pl.launch starts this program"
    channel = CallChannel.from_descriptor(call.channel)
    sys.excepthook = partial(report_failure, place, channel)
    channel.send("called", {"number": call.number})
    # Open the file again: all workers share the read position of the inherited descriptor.
    with open(f"/proc/self/fd/{call.file}", "rb") as file:
        packed_call = packing.unpack_call(file)
    # Tracebacks show the lines of the caller's cells, which are in no file.
    linecache.cache.update(packed_call.sources)
    # Other exceptions go through `sys.excepthook`. Python doesn't call it for SystemExit.
    try:
        result = packed_call.function(*packed_call.args)
    except SystemExit as exit_error:
        if not events.is_regular_exit(exit_error):
            send_error(call, channel, exit_error, exit_error.__traceback__)
            raise
        result = None
    channel.send("result", {"number": call.number}, partial(packing.pack_result, result))


def report_failure(
    place: Place,
    channel: CallChannel,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Report the exception that ends this worker to the launcher and the caller.

    If the other workers continue, the caller raises nothing, so the traceback is also printed here.
    """
    events.report_failure(place, kind, error)
    assert place.call is not None
    text = send_error(place.call, channel, error, trace)
    if not isinstance(error, KeyboardInterrupt) and (
        place.worker is not None or place.job_start is not None
    ):
        print(text, end="", file=sys.stderr, flush=True)


def send_error(
    call: CallPlace, channel: CallChannel, error: BaseException, trace: TracebackType | None
) -> str:
    """Send the traceback of an exception to the caller. Returns its text.

    The traceback begins in the user's code.
    """
    text = (
        format_briefly(error, trace)
        if isinstance(error, BRIEF_ERRORS)
        else "".join(traceback.format_exception(type(error), error, _user_frames(trace)))
    )
    head = "".join(traceback.format_exception_only(error)).strip()
    channel.send(
        "failed",
        {"number": call.number, "head": head[:1000]},
        lambda file: file.write(text.encode(errors="replace")),
    )
    return text


def _user_frames(trace: TracebackType | None) -> TracebackType | None:
    """Skip the frames of a traceback before the user's code.

    A traceback without any of the user's code is returned unchanged.
    """
    inner = trace
    while inner is not None and callsite.is_library_file(inner.tb_frame.f_code.co_filename):
        inner = inner.tb_next
    return trace if inner is None else inner


if __name__ == "__main__":
    main()
