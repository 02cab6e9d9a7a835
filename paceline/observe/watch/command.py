"""`paceline watch`: serves the page of any run, under way or ended, until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

from paceline.errors import UsageError
from paceline.observe.facts import read_facts
from paceline.observe.watch.address import (
    PageGuard,
    WatchAddress,
    check_aiohttp_installed,
    page_url,
)
from paceline.record.folder import RunFolder

LAST_WORDS = "paceline watch has ended, and with it the connection: this page stays as it was."


def check_run_folder(folder: Path) -> None:
    """Raise `UsageError` if a folder isn't that of a run."""
    run = RunFolder(folder)
    if not any(path.is_file() for path in (run.live, run.metrics, run.summary)):
        # Raises with the reason, unless the folder is empty.
        read_facts(run)
        raise UsageError(f"{folder} is empty: give the folder of a run that has begun")


def serve_run(folder: Path, address: WatchAddress, key: bytes, say: Callable[[str], None]) -> int:
    """Serve the page of a run until a signal ends it.

    Args:
        folder: Folder of the run.
        address: Address to serve at.
        key: Secret from which the token of readers is derived.
        say: Function that is told the address of the page.

    Returns:
        The exit code: 128 plus the number of the signal.

    Raises:
        UsageError: There is nothing to serve, or it can't be served.
    """
    check_aiohttp_installed()
    check_run_folder(folder)
    listening = address.open_socket()
    guard = PageGuard.for_socket(listening, key)
    say(f"{folder} can be watched at {page_url(listening, guard)} (Ctrl-C ends this)")

    # Imported here because aiohttp may not be installed.
    from paceline.observe.watch.server import PageServer, serve_page
    from paceline.observe.watch.source import RunPage

    signals: list[int] = []

    async def until() -> str:
        """Wait for a signal, and return the last words to readers."""
        over, loop = asyncio.Event(), asyncio.get_running_loop()

        def end(signum: int) -> None:
            """Note the signal, and end the page."""
            signals.append(signum)
            over.set()

        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(signum, end, signum)
        await over.wait()
        return LAST_WORDS

    async def run() -> None:
        """Serve the page on an event loop."""
        await serve_page(PageServer(RunPage(folder), guard), listening, until)

    asyncio.run(run())
    return 128 + signals[0]
