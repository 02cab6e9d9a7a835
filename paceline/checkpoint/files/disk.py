"""Writes files from beginning to end, hashes them on the way, and syncs them at the end.

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

WRITE_SIZE: Final = 4 << 20  # bytes that are hashed and written in one go
PAGE_SIZE: Final = 4096
_SAFE_OPEN_FLAGS: Final = (
    getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
)
_DIRECT_FLAG: Final = getattr(os, "O_DIRECT", 0)
# Errors of a write with O_DIRECT, if the file system, the disk or the memory doesn't allow it.
_DIRECT_REFUSED: Final = (errno.EINVAL, errno.EFAULT)


class WrittenFile(NamedTuple):
    """The size and the hash of a file that was written."""

    nbytes: int
    sha256: str


def write_file(
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
    with _FileWriter(path) as sink:
        for part in parts:
            # O_DIRECT needs whole pages both in memory and in the file. The end of a piece that
            # isn't a whole page goes through the page cache.
            part_bytes, is_aligned = (
                part.numpy().data,
                part.data_ptr() % PAGE_SIZE == 0 and nbytes % PAGE_SIZE == 0,
            )
            for start in range(0, len(part_bytes), WRITE_SIZE):
                piece = part_bytes[start : start + WRITE_SIZE]
                sha256_digest.update(piece)
                direct_nbytes = len(piece) // PAGE_SIZE * PAGE_SIZE if is_aligned else 0
                sink.write_piece(piece[:direct_nbytes], direct=True)
                sink.write_piece(piece[direct_nbytes:], direct=False)
                moved(len(piece))
            nbytes += len(part_bytes)
    return WrittenFile(nbytes, sha256_digest.hexdigest())


def to_byte_tensor(data: bytes) -> Tensor:
    """Copy `data` into a tensor of bytes, for `write_file`."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def read_file(path: Path, most: int) -> bytes:
    """Read all of a file.

    Raises OSError if it has more than `most` bytes, or as `open_plain_file` does.
    """
    with open_plain_file(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes")
    return data


def compute_sha256(path: Path) -> str:
    """Compute the SHA-256 of a file. Raises OSError."""
    with open_plain_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_plain_file(path: Path) -> BufferedReader:
    """Open a plain file for reading. Raises OSError for anything else.

    A link may lead to a file outside of the checkpoint, and opening a pipe may wait forever.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(errno.EINVAL, "it is no file, but a link, a folder, a pipe or a device")
    return os.fdopen(os.open(path, os.O_RDONLY | _SAFE_OPEN_FLAGS), "rb")


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _FileWriter:
    """A new file that is open for writing. It is synced if its block ends without an error."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._is_direct, self._refuses_direct = False, not _DIRECT_FLAG

    def __enter__(self) -> _FileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def write_piece(self, piece: memoryview, *, direct: bool) -> None:
        """Write all of a piece, with O_DIRECT until it is refused."""
        while piece:
            try:
                self._set_direct(direct and not self._refuses_direct)
                piece = piece[os.write(self._descriptor, piece) :]
            except OSError as error:
                if error.errno not in _DIRECT_REFUSED or self._refuses_direct or not direct:
                    raise
                self._refuses_direct = True

    def _set_direct(self, direct: bool) -> None:
        if direct != self._is_direct:
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(
                self._descriptor,
                fcntl.F_SETFL,
                flags | _DIRECT_FLAG if direct else flags & ~_DIRECT_FLAG,
            )
            self._is_direct = direct
