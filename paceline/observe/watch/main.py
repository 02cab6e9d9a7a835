"""The process that serves the page of a run for its launcher, which writes to its standard input
what is to be shown, a JSON object a line.

{"token": "..."}      first, who may read; empty where only this machine can
{"follow": FOLDER}    the run's folder, once it is known, and again when that is another one
{"tell": WORDS}       a line to be shown
the end of the input  the launcher has ended: readers get the last words, and the process ends
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path

from paceline.observe.watch.address import PageGuard
from paceline.observe.watch.server import PageServer, serve
from paceline.observe.watch.source import RunPage

OVER = "The job has ended, and with it the connection: this page stays as it was."
_LATER = 10  # what is added to its niceness: training goes first


async def _lines() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    return reader


async def run(descriptor: int) -> None:
    """Serve on the socket with this descriptor until the input ends."""
    lines = await _lines()
    page, guard = RunPage(), PageGuard(json.loads(await lines.readline())["token"])

    async def until() -> str:
        while line := await lines.readline():
            message = json.loads(line)
            if "follow" in message:
                page.follow(Path(message["follow"]))
            if "tell" in message:
                page.tell(message["tell"])
        return OVER

    await serve(PageServer(page, guard), socket.socket(fileno=descriptor), until)


def main(descriptor: int) -> None:
    """Serve, whatever signals the terminal sends: the launcher gets those, and ends the input
    when it ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(_LATER)
    asyncio.run(run(descriptor))


if __name__ == "__main__":
    main(int(sys.argv[1]))
