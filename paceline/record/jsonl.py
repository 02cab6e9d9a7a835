"""A file that grows by whole lines.

What could not be written in full is removed again, so that a reader never finds part of a line.
"""

from __future__ import annotations

import contextlib
import json
import os
from io import FileIO
from pathlib import Path
from typing import Any

from paceline.record.folder import unwritten, write_whole


class JsonLines:
    """A file with one JSON object a line.

    If the disk refuses, it raises `ResourceError`, and the file stays as it was.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None

    def append(self, lines: list[str]) -> None:
        """Write these lines, all or none."""
        try:
            file = self._file = self._file or self._open()
            before = os.fstat(file.fileno()).st_size
            data = memoryview("".join(f"{line}\n" for line in lines).encode())
            try:
                while data:
                    data = data[file.write(data) :]
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(before)
                raise
        except OSError as error:
            raise unwritten(self._path, error) from error

    def last(self) -> dict[str, Any] | None:
        """Return the last whole line of a file whose writer may have been killed, and remove
        what follows it. None if there is none.
        """
        try:
            data = self._path.read_bytes() if self._path.exists() else b""
            lines, found = data.split(b"\n")[:-1], None
            while lines and found is None:
                found = _read(lines[-1])
                lines = lines if found is not None else lines[:-1]
            whole = sum(len(line) + 1 for line in lines)
            if whole < len(data):
                os.truncate(self._path, whole)
        except OSError as error:
            raise unwritten(self._path, error) from error
        return found

    def cut(self, step: int) -> list[dict[str, Any]]:
        """Remove the lines of steps after this one, and whatever is no line; return those that
        stay.
        """
        self.close()
        if not self._path.exists():
            return []
        try:
            lines = self._path.read_bytes().split(b"\n")
        except OSError as error:
            raise unwritten(self._path, error) from error
        kept = [line for line in map(_read, lines) if line is not None and line["step"] <= step]
        write_whole(self._path, "".join(f"{json.dumps(line)}\n" for line in kept))
        return kept

    def close(self) -> None:
        """Close the file. Calling it twice is harmless."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _open(self) -> FileIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return FileIO(self._path, "ab")


def _read(line: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        found = json.loads(line)
        return found if isinstance(found, dict) else None
    return None
