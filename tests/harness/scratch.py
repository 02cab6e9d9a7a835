"""Temporary files of a run of the tests in memory: no test waits for a disk, or fails because one
refuses a write for a moment.

A file system in memory is mounted in a mount namespace of the tests' own, and goes with its last
process, however that ends.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Callable

# bytes of memory that must be free, and that may be written: what all tests write has room in it
ROOM = 4 << 30
DISK = "PACELINE_TEST_DISK"  # where temporary files would lie otherwise
_NEW_MOUNTS, _DETACH = 0x20000, 2  # CLONE_NEWNS, MNT_DETACH
_PRIVATE = 0x4000 | 0x40000  # MS_REC | MS_PRIVATE


def in_memory() -> Callable[[], None] | None:
    """Put the temporary files of this process, and of those that it starts from now on, into
    memory; return what ends that.

    None where this can't be had (it takes Linux and root), where memory is short, or where TMPDIR
    names a place: they lie there then.
    """
    if "TMPDIR" in os.environ or not hasattr(os, "geteuid") or os.geteuid() != 0 or _free() < ROOM:
        return None
    # a short name: sockets are made in it
    libc, folder = ctypes.CDLL(None), tempfile.mkdtemp(prefix="pt-")
    where, most = os.fsencode(folder), b"mode=1777,size=%d" % ROOM
    if (
        libc.unshare(_NEW_MOUNTS)
        or libc.mount(b"none", b"/", None, _PRIVATE, None)
        or libc.mount(b"tests", where, b"tmpfs", 0, most)
    ):
        os.rmdir(folder)
        return None
    os.environ |= {DISK: tempfile.gettempdir(), "TMPDIR": folder}
    tempfile.tempdir = folder

    def end() -> None:
        libc.umount2(where, _DETACH)
        shutil.rmtree(folder, ignore_errors=True)

    return end


def _free() -> int:
    """Bytes of memory that are free or can be freed."""
    try:
        with open("/proc/meminfo", encoding="ascii") as table:
            return next(
                1024 * int(line.split()[1]) for line in table if line.startswith("MemAvailable:")
            )
    except (OSError, StopIteration):
        return 0
