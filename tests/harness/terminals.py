"""Programs on a terminal of their own, and what is to be seen there when they have ended."""

from __future__ import annotations

import os
import subprocess
import termios
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.harness.jobs import PATIENCE, ROOT
from tests.harness.terminal_screen import TerminalScreen


class OnTerminal:
    """A program whose output and error are a terminal of so many `columns`.

    It is ended with the `with` block, at the latest.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, *, columns: int = 80, **environ: str
    ) -> None:
        self._master, slave = os.openpty()
        termios.tcsetwinsize(slave, (24, columns))
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("OMP_", "PACELINE_")) and name != "CI"
        }
        self.process = subprocess.Popen(
            command,
            stdout=slave,
            stderr=slave,
            cwd=folder,
            env={**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm", **environ},
        )
        os.close(slave)
        self._terminal = TerminalScreen(columns, 24)
        self.said = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 1 << 16)
            except OSError:  # as Linux ends a terminal
                return
            if not data:
                return
            self.said += data

    def __enter__(self) -> OnTerminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        self._thread.join(PATIENCE)
        os.close(self._master)

    def end(self, code: int = 0) -> list[str]:
        """Wait for its end, with this exit code, and return the lines on the terminal."""
        assert self.process.wait(PATIENCE) == code, self.said
        self._thread.join(PATIENCE)
        self._terminal.feed(self.said.decode())
        return self._terminal.text()
