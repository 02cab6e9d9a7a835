"""The process that serves the page of a run for its launcher, which sends messages to its input.

Each message is one line of JSON:

{"token": "..."}      first: the token that readers need; empty if only this machine can read
{"follow": FOLDER}    the run's folder, once it is known, and again if it changes
{"tell": WORDS}       a line to show
end of the input      the launcher has ended: readers get the last words, and the process ends
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
from paceline.observe.watch.server import PageServer, serve_page
from paceline.observe.watch.source import RunPage

LAST_WORDS = "The job has ended, and with it the connection: this page stays as it was."
# Added to the niceness of the process, because training goes first.
_NICENESS = 10


async def _open_input() -> asyncio.StreamReader:
    """Open standard input as a stream of lines."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    return reader


async def serve_until_input_ends(descriptor: int) -> None:
    """Serve on the socket with this descriptor until the input ends."""
    lines = await _open_input()
    page, guard = RunPage(), PageGuard(json.loads(await lines.readline())["token"])

    async def until() -> str:
        """Handle the launcher's messages to the end, and return the last words to readers."""
        while line := await lines.readline():
            message = json.loads(line)
            if "follow" in message:
                page.follow_run(Path(message["follow"]))
            if "tell" in message:
                page.show_line(message["tell"])
        return LAST_WORDS

    await serve_page(PageServer(page, guard), socket.socket(fileno=descriptor), until)


def main(descriptor: int) -> None:
    """Serve, and ignore Ctrl-C.

    The terminal sends it to the launcher, too, which ends the input when it ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    asyncio.run(serve_until_input_ends(descriptor))


if __name__ == "__main__":
    main(int(sys.argv[1]))
