"""Files written once, from beginning to end: hashed on the way, and on the disk at the end.

Bytes that lie on whole pages of memory go to the disk from there (O_DIRECT, if the file system
takes it): no copy of them is made in the page cache, which keeps the data that training reads.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterable
from io import BufferedReader
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PIECE: Final = 4 << 20  # bytes that are hashed and written in one go
PAGE: Final = 4096
_CAREFUL: Final = (
    getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
)
_DIRECT: Final = getattr(os, "O_DIRECT", 0)
# what a file system, a disk, or memory that can't be lent to it refuses O_DIRECT with
_NOT_SO: Final = (errno.EINVAL, errno.EFAULT)


class WrittenFile(NamedTuple):
    """The size and the hash of a file that was written."""

    nbytes: int
    sha256: str


def write(
    path: Path, parts: Iterable[Tensor], *, moved: Callable[[int], None] = lambda nbytes: None
) -> WrittenFile:
    """Write `parts` (1-D uint8, on the CPU) one after the other to a new file, and wait until the
    disk has them.

    `moved` is called with the number of bytes as they are written. Raises OSError.
    """
    digest, nbytes = hashlib.sha256(), 0
    with _Sink(path) as sink:
        for part in parts:
            view, aligned = part.numpy().data, part.data_ptr() % PAGE == 0 and nbytes % PAGE == 0
            for begin in range(0, len(view), PIECE):
                piece = view[begin : begin + PIECE]
                digest.update(piece)
                whole = len(piece) // PAGE * PAGE if aligned else 0
                sink.put(piece[:whole], direct=True)
                sink.put(piece[whole:], direct=False)
                moved(len(piece))
            nbytes += len(view)
    return WrittenFile(nbytes, digest.hexdigest())


def block(data: bytes) -> Tensor:
    """Make a part of `data`."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def read(path: Path, most: int) -> bytes:
    """Read all of a file.

    Raises OSError for one that has more than `most` bytes, and as `opened` does.
    """
    with opened(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes")
    return data


def sha256(path: Path) -> str:
    """Compute the hash of a file. Raises OSError."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def opened(path: Path) -> BufferedReader:
    """Open a plain file for reading. Raises OSError for anything else.

    A link may lead to a stranger's file, and opening a pipe waits.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(errno.EINVAL, "it is no file, but a link, a folder, a pipe or a device")
    return os.fdopen(os.open(path, os.O_RDONLY | _CAREFUL), "rb")


def sync(path: Path) -> None:
    """Wait until the disk has the folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Sink:
    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._direct, self._refused = False, not _DIRECT

    def __enter__(self) -> _Sink:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                os.fsync(self._file)
        finally:
            os.close(self._file)

    def put(self, piece: memoryview, *, direct: bool) -> None:
        while piece:
            try:
                self._switch(direct and not self._refused)
                piece = piece[os.write(self._file, piece) :]
            except OSError as error:
                if error.errno not in _NOT_SO or self._refused or not direct:
                    raise
                self._refused = True

    def _switch(self, direct: bool) -> None:
        if direct != self._direct:
            flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | _DIRECT if direct else flags & ~_DIRECT)
            self._direct = direct
