"""The program of a worker of `pl.launch`: calls the function that it was sent, and sends back
what that returns or raises.
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
from paceline.cluster.discover import CallPlace, Place, discover
from paceline.notebook import packing
from paceline.session.excepthook import BRIEFLY, brief


def main() -> None:
    """Carry out the call.

    An exception of the function ends this process as it ends a script, and the caller is told of
    it.
    """
    place = discover()
    call = place.call
    assert call is not None, "only pl.launch starts this program"
    channel = CallChannel.inherited(call.channel)
    sys.excepthook = partial(report, place, channel)
    channel.send("called", {"number": call.number})
    # with a position of its own: all workers read the same file
    with open(f"/proc/self/fd/{call.file}", "rb") as file:
        asked = packing.unpack_call(file)
    linecache.cache.update(asked.sources)
    try:
        result = asked.function(*asked.args)
    except SystemExit as left:
        if not events.leaves_well(left):
            send(call, channel, left, left.__traceback__)
            raise
        result = None
    channel.send("result", {"number": call.number}, partial(packing.pack_result, result))


def report(
    place: Place,
    channel: CallChannel,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Tell the launcher and the caller what ends this worker.

    Shown here, too, where the others go on: then the caller raises nothing.
    """
    events.report_failure(place, kind, error)
    assert place.call is not None
    text = send(place.call, channel, error, trace)
    if not isinstance(error, KeyboardInterrupt) and (
        place.worker is not None or place.job_start is not None
    ):
        print(text, end="", file=sys.stderr, flush=True)


def send(
    call: CallPlace, channel: CallChannel, error: BaseException, trace: TracebackType | None
) -> str:
    """Send the caller the traceback of an exception, and return it: the part that begins in the
    function.
    """
    text = (
        brief(error, trace)
        if isinstance(error, BRIEFLY)
        else "".join(traceback.format_exception(type(error), error, _inside(trace)))
    )
    head = "".join(traceback.format_exception_only(error)).strip()
    channel.send(
        "failed",
        {"number": call.number, "head": head[:1000]},
        lambda file: file.write(text.encode(errors="replace")),
    )
    return text


def _inside(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins in a user's code; all of it where there is
    none.
    """
    inner = trace
    while inner is not None and callsite.foreign(inner.tb_frame.f_code.co_filename):
        inner = inner.tb_next
    return trace if inner is None else inner


if __name__ == "__main__":
    main()
