"""`paceline watch`: serves the page of a run that somebody else has started, or that has ended,
until Ctrl-C.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

from paceline.errors import UsageError
from paceline.observe.facts import read
from paceline.observe.watch.address import PageGuard, WatchAddress, check_installed, url
from paceline.record.folder import RunFolder

OVER = "paceline watch has ended, and with it the connection: this page stays as it was."


def check_run(folder: Path) -> None:
    """Raise `UsageError` for a folder that is no run's."""
    run = RunFolder(folder)
    if not any(path.is_file() for path in (run.live, run.metrics, run.summary)):
        read(run)  # says what is wrong with it, unless it is empty
        raise UsageError(f"{folder} is empty: give the folder of a run that has begun")


def watch(folder: Path, address: WatchAddress, key: bytes, say: Callable[[str], None]) -> int:
    """Serve the page of this run until a signal asks for the end; returns the exit code.

    `say` is told where the page is.

    Raises `UsageError` where there is nothing to be served, or it can't be.
    """
    check_installed()
    check_run(folder)
    listening = address.listen()
    guard = PageGuard.of(listening, key)
    say(f"{folder} can be watched at {url(listening, guard)} (Ctrl-C ends this)")

    # here: the library may not be installed
    from paceline.observe.watch.server import PageServer, serve
    from paceline.observe.watch.source import RunPage

    asked: list[int] = []

    async def until() -> str:
        over, loop = asyncio.Event(), asyncio.get_running_loop()

        def end(number: int) -> None:
            asked.append(number)
            over.set()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, end, number)
        await over.wait()
        return OVER

    async def run() -> None:
        await serve(PageServer(RunPage(folder), guard), listening, until)

    asyncio.run(run())
    return 128 + asked[0]
