"""A file that grows by whole lines.

A line that could not be written completely is removed again, so a reader never finds part of one.
"""

from __future__ import annotations

import contextlib
import json
import os
from io import FileIO
from pathlib import Path
from typing import Any

from paceline.record.folder import write_atomically, write_error


class JsonLines:
    """A file with one JSON object per line.

    If the disk refuses a write, `ResourceError` is raised and the file stays as it was.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None

    def append_lines(self, lines: list[str]) -> None:
        """Write these lines, all or none."""
        try:
            file = self._file = self._file or self._open_file()
            size_before = os.fstat(file.fileno()).st_size
            # An unbuffered file may write less than it was given, so writing goes on until nothing
            # is left.
            data = memoryview("".join(f"{line}\n" for line in lines).encode())
            try:
                while data:
                    data = data[file.write(data) :]
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(size_before)
                raise
        except OSError as error:
            raise write_error(self._path, error) from error

    def read_last_line(self) -> dict[str, Any] | None:
        """Return the last whole line, and remove what follows it; None if there is no whole line.

        The process that wrote the file may have been killed in the middle of a line.
        """
        try:
            data = self._path.read_bytes() if self._path.exists() else b""
            lines, last_line = data.split(b"\n")[:-1], None
            while lines and last_line is None:
                last_line = _parse_line(lines[-1])
                lines = lines if last_line is not None else lines[:-1]
            # Whole lines, with their line ends.
            nbytes = sum(len(line) + 1 for line in lines)
            if nbytes < len(data):
                os.truncate(self._path, nbytes)
        except OSError as error:
            raise write_error(self._path, error) from error
        return last_line

    def list_after_step(self, step: int) -> list[dict[str, Any]]:
        """List the lines of steps after `step`; none if the file can't be read."""
        with contextlib.suppress(OSError):
            lines = map(_parse_line, self._path.read_bytes().split(b"\n"))
            return [line for line in lines if line is not None and line["step"] > step]
        return []

    def cut_after_step(self, step: int) -> list[dict[str, Any]]:
        """Remove the lines of steps after `step`, and damaged lines; return the remaining lines."""
        self.close()
        if not self._path.exists():
            return []
        try:
            lines = self._path.read_bytes().split(b"\n")
        except OSError as error:
            raise write_error(self._path, error) from error
        remaining = [
            line for line in map(_parse_line, lines) if line is not None and line["step"] <= step
        ]
        write_atomically(self._path, "".join(f"{json.dumps(line)}\n" for line in remaining))
        return remaining

    def close(self) -> None:
        """Close the file. Calling it twice is harmless."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _open_file(self) -> FileIO:
        """Open the file for appending, without a buffer."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return FileIO(self._path, "ab")


def _parse_line(line: bytes) -> dict[str, Any] | None:
    """Parse a line; None if it isn't a JSON object."""
    with contextlib.suppress(ValueError):
        fields = json.loads(line)
        return fields if isinstance(fields, dict) else None
    return None
