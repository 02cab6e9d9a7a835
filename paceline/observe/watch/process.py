"""The launcher's side of a live page, which is served by a process beside the workers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final

from paceline.cluster.discover import copy_environment
from paceline.errors import UsageError
from paceline.observe.watch.address import (
    PageGuard,
    WatchAddress,
    check_aiohttp_installed,
    page_url,
)

# Seconds for sending the last words to readers.
PATIENCE: Final = 5.0


class WatchedJob:
    """The live page of a job, as its launcher controls it.

    The port is taken at once.

    Args:
        address: Address to serve at.
        key: Secret of the job, from which the token of readers is derived.
        elsewhere: Whether the run may be written on another host, which then serves the page. A
            taken port is then an error only once the run turns out to be written here.
        say: Function that is told the address of the page.

    Raises:
        UsageError: The page can't be served.
    """

    def __init__(
        self,
        address: WatchAddress,
        key: bytes,
        *,
        elsewhere: bool = False,
        say: Callable[[str], None],
    ) -> None:
        check_aiohttp_installed()
        self._address, self._key, self._say = address, key, say
        self._process: subprocess.Popen[bytes] | None = None
        self._listening: socket.socket | None = None
        # Whether it was announced that there is no page.
        self._has_complained = False
        with contextlib.suppress(*([UsageError] if elsewhere else [])):
            self._listening = address.open_socket()

    def begin_serving(self) -> None:
        """Start to serve the page, because the run is written on this host.

        Calling it twice is harmless.

        Raises:
            UsageError: The port can't be taken.
        """
        if self._process is not None:
            return
        listening = self._listening = self._listening or self._address.open_socket()
        guard = PageGuard.for_socket(listening, self._key)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "paceline.observe.watch.main", str(listening.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listening.fileno()],
            # Ctrl-C goes to the launcher alone. This process shows how the job ends.
            process_group=0,
            env={**copy_environment(), "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdin is not None
        # If the server hangs, the pipe fills up. A blocking write would then stop the launcher.
        os.set_blocking(self._process.stdin.fileno(), False)
        self._send_message({"token": guard.token})
        self._say(f"this run can be watched at {page_url(listening, guard)}")

    def follow_run(self, folder: Path) -> None:
        """Show the run in this folder, which a worker of this host writes from now on.

        If the page can't be served, a message says so, once.
        """
        try:
            self.begin_serving()
        except UsageError as error:
            if not self._has_complained:
                self._say(str(error))
            self._has_complained = True
        self._send_message({"follow": str(folder)})

    def show_line(self, words: str) -> None:
        """Show this line on the page."""
        self._send_message({"tell": words})

    def _send_message(self, message: Mapping[str, str]) -> None:
        """Send a message to the process, which may be gone."""
        if self._process is not None and self._process.stdin is not None:
            # A server that has died, or is too slow, must not disturb the training.
            with contextlib.suppress(OSError):
                os.write(self._process.stdin.fileno(), json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Send readers the last words, and end the process."""
        process, listening = self._process, self._listening
        if listening is not None:
            listening.close()
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> WatchedJob:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
