"""Files that are written once, from beginning to end, hashed on the way, and synced at the end.

Bytes on whole pages of memory go to the disk without a copy (O_DIRECT, if the file system allows
it). So they don't push the data that training reads out of the page cache.
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
# Errors of a write with O_DIRECT, if the file system, the disk or the memory doesn't allow it.
_NOT_SO: Final = (errno.EINVAL, errno.EFAULT)


class WrittenFile(NamedTuple):
    """The size and the hash of a file that was written."""

    nbytes: int
    sha256: str


def write(
    path: Path, parts: Iterable[Tensor], *, moved: Callable[[int], None] = lambda nbytes: None
) -> WrittenFile:
    """Write tensors one after the other to a new file, and wait until the disk has them.

    Args:
        path: The new file.
        parts: Tensors of bytes (1-D, uint8, on the CPU).
        moved: Called with the number of bytes as they are written.

    Raises:
        OSError: The file exists, or can't be written.
    """
    sha256_digest, nbytes = hashlib.sha256(), 0
    with _Sink(path) as sink:
        for part in parts:
            # O_DIRECT needs whole pages both in memory and in the file. The rest of a piece goes
            # through the page cache.
            part_bytes, is_aligned = (
                part.numpy().data,
                part.data_ptr() % PAGE == 0 and nbytes % PAGE == 0,
            )
            for start in range(0, len(part_bytes), PIECE):
                piece = part_bytes[start : start + PIECE]
                sha256_digest.update(piece)
                direct_nbytes = len(piece) // PAGE * PAGE if is_aligned else 0
                sink.put(piece[:direct_nbytes], direct=True)
                sink.put(piece[direct_nbytes:], direct=False)
                moved(len(piece))
            nbytes += len(part_bytes)
    return WrittenFile(nbytes, sha256_digest.hexdigest())


def block(data: bytes) -> Tensor:
    """Copy `data` into a tensor of bytes, for `write_file`."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def read(path: Path, most: int) -> bytes:
    """Read all of a file.

    Raises OSError if it has more than `most` bytes, or as `open_plain_file` does.
    """
    with opened(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes")
    return data


def sha256(path: Path) -> str:
    """Compute the SHA-256 of a file. Raises OSError."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def opened(path: Path) -> BufferedReader:
    """Open a plain file for reading. Raises OSError for anything else.

    A link may lead to a file outside of the checkpoint, and opening a pipe may wait forever.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(errno.EINVAL, "it is no file, but a link, a folder, a pipe or a device")
    return os.fdopen(os.open(path, os.O_RDONLY | _CAREFUL), "rb")


def sync(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Sink:
    """A new file that is open for writing. It is synced if its block ends without an error."""

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
        """Write all of a piece, with O_DIRECT until it is refused."""
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
