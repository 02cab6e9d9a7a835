"""The server of a run's page as its launcher sees it: a process beside the workers, on which
nothing that trains depends.
"""

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

from paceline.cluster.discover import environment
from paceline.errors import UsageError
from paceline.observe.watch.address import PageGuard, WatchAddress, check_installed, url

PATIENCE: Final = 5.0  # seconds for the last words to readers


class WatchedJob:
    """The page of the job that a launcher starts, at this address.

    `key`: the job's secret, of which the token of readers is made.

    The port is taken at once. Where the run may be of another host (`elsewhere`), which serves its
    page then, that it can't be had matters only once the run turns out to be here. `say` is told
    where the page is.

    Raises `UsageError` where nothing can be served.
    """

    def __init__(
        self,
        address: WatchAddress,
        key: bytes,
        *,
        elsewhere: bool = False,
        say: Callable[[str], None],
    ) -> None:
        check_installed()
        self._address, self._key, self._say = address, key, say
        self._process: subprocess.Popen[bytes] | None = None
        self._listening: socket.socket | None = None
        self._said = False  # that there is no page
        with contextlib.suppress(*([UsageError] if elsewhere else [])):
            self._listening = address.listen()

    def begin(self) -> None:
        """Serve the page, as the run is of this host.

        Raises `UsageError` where the port can't be had. Twice is harmless.
        """
        if self._process is not None:
            return
        listening = self._listening = self._listening or self._address.listen()
        guard = PageGuard.of(listening, self._key)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "paceline.observe.watch.main", str(listening.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listening.fileno()],
            # Ctrl-C is for the launcher, which has this process show what comes of it
            process_group=0,
            env={**environment(), "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)  # a server that hangs holds up nobody
        self._write({"token": guard.token})
        self._say(f"this run can be watched at {url(listening, guard)}")

    def follow(self, folder: Path) -> None:
        """Show the run in this folder, which a worker of this host writes from now on; a line
        says so where that can't be.
        """
        try:
            self.begin()
        except UsageError as error:
            if not self._said:
                self._say(str(error))
            self._said = True
        self._write({"follow": str(folder)})

    def tell(self, words: str) -> None:
        """Show this line."""
        self._write({"tell": words})

    def _write(self, message: Mapping[str, str]) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # its death is no matter of the training
                os.write(self._process.stdin.fileno(), json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Let readers have the last words, and end the process."""
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
