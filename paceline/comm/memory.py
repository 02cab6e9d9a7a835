"""Memory that several processes of one host map: made by one, opened by the others, and gone with the last of them.

A segment is an anonymous file (memfd) that peers open as `/proc/PID/fd/FD`: it has no name that a killed process could
leave behind, and /dev/shm's size (64 MB in many containers) does not bound it. Where the kernel has no memfd, or a peer may
not open it, a file in /dev/shm serves, which is unlinked as soon as everybody has mapped it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.errors import ResourceError

SHM = "/dev/shm"


class Segment:
    """A stretch of `nbytes` shared bytes, all zero at first."""

    def __init__(self, fd: int, nbytes: int, path: str | None) -> None:
        self.nbytes = nbytes
        self._path = path
        self._fd = fd
        self.map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))

    @classmethod
    def create(cls, nbytes: int, *, folder: str | None = None) -> Segment:
        """A new segment; `folder` asks for a file there instead of a memfd. `ResourceError` when there is no room."""
        path = None
        if folder is None and hasattr(os, "memfd_create"):
            fd = os.memfd_create("paceline", os.MFD_CLOEXEC)
        else:
            fd, path = tempfile.mkstemp(prefix="paceline-", dir=folder or SHM)
        try:
            os.posix_fallocate(fd, 0, nbytes)  # reserve now: a page missing later would be a SIGBUS
            return cls(fd, nbytes, path)
        except OSError as error:
            os.close(fd)
            if path is not None:
                os.unlink(path)
            raise ResourceError(
                f"{_mib(nbytes)} of shared memory can't be had ({error.strerror}{_room(path)}); give the container more "
                "(docker run --shm-size=2g, or a larger memory limit)"
            ) from error

    @property
    def address(self) -> str:
        """Where another process of this host opens it (until `seal`)."""
        return self._path or f"/proc/{os.getpid()}/fd/{self._fd}"

    @classmethod
    def open(cls, address: str, nbytes: int) -> Segment:
        """Map a segment that another process has made."""
        try:
            fd = os.open(address, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ResourceError(f"the shared memory of a worker on this host can't be opened ({address}: {error.strerror})") from error
        if os.fstat(fd).st_size != nbytes:
            os.close(fd)
            raise ResourceError(f"the shared memory {address} has another size than the {nbytes} bytes agreed on")
        return cls(fd, nbytes, None)

    def seal(self) -> None:
        """All have mapped it: take its name away. The memory goes with the last mapping."""
        if self._path is not None:
            os.unlink(self._path)
            self._path = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A view of the bytes from `offset` on; keeps the mapping alive."""
        count = 1
        for length in shape:
            count *= length
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(self.map, dtype=dtype, count=count, offset=offset).view(tuple(shape))


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"


def _room(path: str | None) -> str:
    if path is None:
        return ""
    stat = os.statvfs(os.path.dirname(path))
    return f"; {os.path.dirname(path)} has {_mib(stat.f_bavail * stat.f_frsize)} free"
