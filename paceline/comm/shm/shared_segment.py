"""Shared memory segments of one host: made by one process, mapped by others, freed with the last.

A segment is an anonymous file (memfd), which peers open as `/proc/PID/fd/FD`. It has no name that a
killed process could leave behind, and the size of /dev/shm (64 MB in many containers) does not
bound it. If the kernel has no memfd, or a peer may not open it, the segment is a file in /dev/shm,
which is unlinked as soon as all processes have mapped it. No descriptor stays open.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ResourceError

SHM = "/dev/shm"
# Numbers of Linux, which Python's mmap does not have, or not in all versions.
POPULATE = 23  # MADV_POPULATE_WRITE
HUGEPAGE = 14  # MADV_HUGEPAGE
DONTNEED = 4  # MADV_DONTNEED
FIXED = 16  # MAP_FIXED
LARGE = 4 << 20  # bytes of a tensor from which large pages are worth asking for
PAGE = 4096  # bytes


def empty_on_cpu(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate an empty CPU tensor.

    A large one gets large pages if the kernel has them: its first write takes half the time.
    """
    tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu")
    nbytes = tensor.numel() * dtype.itemsize
    if nbytes >= LARGE:
        start = -(-tensor.data_ptr() // PAGE) * PAGE
        _advise_kernel(start, (tensor.data_ptr() + nbytes - start) // PAGE * PAGE, HUGEPAGE)
    return tensor


def discard_pages(address: int, nbytes: int) -> None:
    """Give the whole pages of private memory back to the kernel. They then read as zeros."""
    start, stop = -(-address // PAGE) * PAGE, (address + nbytes) // PAGE * PAGE
    if stop > start:
        _advise_kernel(start, stop - start, DONTNEED)


def make_writes_private(address: int, nbytes: int, descriptor: int) -> None:
    """Make shared memory private to this process, in place: a page is copied at its first write.

    Until then a page shows what others write to it.

    Args:
        address: Where the memory is mapped.
        nbytes: Its length.
        descriptor: The file it is mapped from.
    """
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    # Mapped over the old mapping: the address stays the same, so tensors there do not notice.
    if (
        call(
            address,
            nbytes,
            mmap.PROT_READ | mmap.PROT_WRITE,
            mmap.MAP_PRIVATE | FIXED,
            descriptor,
            0,
        )
        != address
    ):
        raise ResourceError(
            f"{_format_mib(nbytes)} of shared memory can't be mapped again "
            f"({os.strerror(ctypes.get_errno())})"
        )


class SharedSegment:
    """A stretch of shared memory, all zero at first. Its tensors keep it mapped.

    Args:
        fd: Descriptor of the file.
        nbytes: Its length.
        path: Name of the file; None for a memfd.
        at_once: Whether all pages are mapped now. If not, each is mapped when it is first touched,
            and unused pages take no memory. Default: yes.
    """

    def __init__(self, fd: int, nbytes: int, path: str | None, *, at_once: bool = True) -> None:
        self.nbytes = nbytes
        self._path, self._fd = path, fd
        self.named = path is not None
        # Through /proc, as torch maps a file by its name alone.
        self._storage: Any = torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", True, nbytes)
        self.start = self._storage.data_ptr()  # address of the first byte
        # Kernels before 5.14 can't: the first touch of each page is then slower, nothing else.
        if at_once:
            _advise_kernel(self.start, nbytes, POPULATE)

    @classmethod
    def create(
        cls, nbytes: int, *, folder: str | None = None, at_once: bool = True
    ) -> SharedSegment:
        """Make a new segment: a memfd, or a file in `folder`. `ResourceError` without room."""
        fd, path = -1, None
        try:
            if folder is None and hasattr(os, "memfd_create"):
                fd = os.memfd_create("paceline", os.MFD_CLOEXEC)
            else:
                fd, path = tempfile.mkstemp(prefix="paceline-", dir=folder or SHM)
            # Reserve all pages now: a page that can't be had later would be a SIGBUS.
            os.posix_fallocate(fd, 0, nbytes)
            return cls(fd, nbytes, path, at_once=at_once)
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
            room = _describe_room(folder or SHM) if path is not None else ""
            if fd >= 0:
                os.close(fd)
            if path is not None:
                os.unlink(path)
            raise ResourceError(
                f"{_format_mib(nbytes)} of shared memory can't be had ({reason}{room}); "
                "give the container more (docker run --shm-size=2g, or a larger memory limit)"
            ) from error

    @property
    def address(self) -> str:
        """Path by which another process of this host opens the segment, until `seal`."""
        return self._path or f"/proc/{os.getpid()}/fd/{self._fd}"

    @classmethod
    def open(
        cls, address: str, nbytes: int, *, alone: bool = False, at_once: bool = True
    ) -> SharedSegment:
        """Map a segment that another process has made.

        Args:
            address: Its path.
            nbytes: Its length; another one raises `ResourceError`.
            alone: Whether no other process will map it: its name, if it has one, is removed.
            at_once: Whether all pages are mapped now. Default: yes.
        """
        fd = -1
        try:
            fd = os.open(address, os.O_RDWR | os.O_CLOEXEC)
            if os.fstat(fd).st_size != nbytes:
                raise ResourceError(
                    f"the shared memory {address} has another size than "
                    f"the {nbytes} bytes agreed on"
                )
            segment = cls(fd, nbytes, None, at_once=at_once)
            segment.named = not address.startswith("/proc/")
            if alone and segment.named:
                os.unlink(address)
        except (OSError, RuntimeError) as error:
            raise ResourceError(
                f"the shared memory of a worker on this host can't be mapped ({address}: {error})"
            ) from error
        finally:
            if fd >= 0:
                os.close(fd)
        segment._fd = -1
        return segment

    def map_again(self) -> Any:
        """Map the segment once more, as a storage that keeps this mapping alone. Before `seal`."""
        # `_new_shared_fd_cpu` is private to torch: it is what torch.multiprocessing calls for a
        # tensor from another process. The storage then has a descriptor, which a fork needs.
        storages: Any = torch.UntypedStorage  # torch's stubs don't know all of it
        try:
            storage = storages._new_shared_fd_cpu(self._fd, self.nbytes)
        except RuntimeError as error:
            self.seal()
            raise ResourceError(
                f"{_format_mib(self.nbytes)} of shared memory can't be mapped twice "
                f"({str(error).splitlines()[0]})"
            ) from error
        _advise_kernel(storage.data_ptr(), self.nbytes, POPULATE)
        return storage

    def seal(self) -> None:
        """Remove the segment's name: all have mapped it. It is freed with its last mapping."""
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):  # the one that maps it `alone` was faster
                os.unlink(self._path)
            self._path = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def view_tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """View the bytes from `offset` on as a tensor. `offset`: a multiple of the item size."""
        # It may outlive the evaluation in which it is first used.
        with torch.inference_mode(False):
            view = torch.empty(0, dtype=dtype, device="cpu")
            if prod(shape):
                view.set_(self._storage, offset // dtype.itemsize, (prod(shape),), (1,))
            return view.view(tuple(shape))

    def view_bytes(self) -> memoryview:
        """View the bytes of the segment as a memoryview, for reading and writing from Python."""
        # numpy's stubs before Python 3.12
        return memoryview(self.view_tensor(0, (self.nbytes,), torch.uint8).numpy())  # type: ignore[arg-type]


def make_shared_segment(
    nbytes: int,
    me: int,
    leader: int,
    meet: Callable[[str], Sequence[str]],
    *,
    inside: bool,
    folder: str | None,
    at_once: bool = True,
) -> SharedSegment | None:
    """Make a segment for several ranks: `leader` makes it, all that are `inside` map it.

    First a memfd is tried, then a file in /dev/shm. With a `folder`, only a file there.

    Args:
        nbytes: Length of the segment.
        me: This rank.
        leader: The rank that makes it.
        meet: Gathers a word of every rank: takes this rank's, gives all, in rank order. All ranks
            call it the same number of times.
        inside: Whether this rank maps it.
        folder: Folder of the file. Default: none.
        at_once: Whether all pages are mapped now. Default: yes.

    Returns:
        The segment; None on ranks that are not inside.

    Raises:
        ResourceError: A rank can't map it; raised on all ranks.
    """
    errors: list[str] = []
    for place in (folder,) if folder is not None else (None, SHM):
        segment, error = None, ""
        try:
            if me == leader:
                segment, error = _attempt_segment(
                    lambda place=place: SharedSegment.create(nbytes, folder=place, at_once=at_once)  # type: ignore[misc]
                )
            address = meet(segment.address if segment is not None else "")[leader]
            if inside and me != leader and address:
                segment, error = _attempt_segment(
                    lambda address=address: SharedSegment.open(address, nbytes, at_once=at_once)  # type: ignore[misc]
                )
            errors = [word for word in meet(error) if word]
        finally:
            if segment is not None:
                segment.seal()
        if not errors:
            return segment
    raise ResourceError(errors[0])


def _attempt_segment(make: Callable[[], SharedSegment]) -> tuple[SharedSegment | None, str]:
    try:
        return make(), ""
    except ResourceError as error:
        return None, str(error)


def _format_mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"


def _describe_room(folder: str) -> str:
    stat = os.statvfs(folder)
    return f"; {folder} has {_format_mib(stat.f_bavail * stat.f_frsize)} free"


def _advise_kernel(address: int, nbytes: int, advice: int) -> None:
    """Give the kernel advice about memory. If it can't follow, memory is slower, nothing else."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)
