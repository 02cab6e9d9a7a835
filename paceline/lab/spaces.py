"""Linux namespaces without names: made in a thread, held by descriptors, gone when the last
descriptor and process are.
"""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from paceline.errors import ResourceError

T = TypeVar("T")

# linux/sched.h
KINDS: Final = {
    "mnt": 0x0002_0000,
    "uts": 0x0400_0000,
    "ipc": 0x0800_0000,
    "user": 0x1000_0000,
    "net": 0x4000_0000,
}
_THREAD_SECONDS: Final = 1.0
_MS_BIND, _MS_REC, _MS_SLAVE = 1 << 12, 1 << 14, 1 << 19  # linux/mount.h


class NamespaceSet:
    """Namespaces of one host (or of a switch, which has only a network).

    `fds` holds them, by kind.
    """

    def __init__(self, fds: dict[str, int]) -> None:
        self.fds = fds
        # "net:[4026532184]": the same for every process in it
        self.network = os.readlink(f"/proc/self/fd/{fds['net']}")

    @staticmethod
    def make_namespaces(
        kinds: Sequence[str], prepare: Callable[[], None] = lambda: None
    ) -> NamespaceSet:
        """Make new namespaces of these kinds.

        `prepare` runs once inside. Raises `ResourceError` where the kernel refuses.
        """

        def open_all() -> dict[str, int]:
            unshare_thread(kinds)
            prepare()
            return {
                kind: os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
                for kind in kinds
            }

        return NamespaceSet(_call_in_thread(open_all))

    def call_inside(self, do: Callable[[], T]) -> T:
        """Call `do` in this network; it runs in a thread of its own, whose errors are raised
        here.
        """

        def enter() -> T:
            _call_libc("setns", self.fds["net"], KINDS["net"])
            return do()

        return _call_in_thread(enter)

    def close(self) -> None:
        """Close the descriptors: the namespaces end with the last process in them.

        Calling it twice is harmless.
        """
        while self.fds:
            os.close(self.fds.popitem()[1])


def unshare_thread(kinds: Sequence[str]) -> None:
    """Put the calling thread into new namespaces of these kinds."""
    flags = 0
    for kind in kinds:
        flags |= KINDS[kind]
    _call_libc("unshare", flags)


def make_furnisher(hostname: str, names: Path) -> Callable[[], None]:
    """Make the function that turns new namespaces into a host: its name, the table `names` as
    /etc/hosts, shared memory of its own.
    """

    def prepare() -> None:
        socket.sethostname(hostname)
        # nothing mounted here is seen outside
        _call_libc("mount", b"none", b"/", None, _MS_REC | _MS_SLAVE, None)
        if os.path.isdir("/dev/shm"):
            _call_libc("mount", b"paceline-lab", b"/dev/shm", b"tmpfs", 0, b"mode=1777")
        if os.path.exists("/etc/hosts"):
            _call_libc("mount", os.fsencode(names), b"/etc/hosts", None, _MS_BIND, None)

    return prepare


def become_root() -> None:
    """Enter a user namespace in which this process is root, for good; it must have one thread.

    Outside it has the same rights as before.
    """
    user, group = os.geteuid(), os.getegid()
    end = time.monotonic() + _THREAD_SECONDS
    while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < end:
        time.sleep(0.001)  # a thread that was joined may still be ending
    unshare_thread(["user"])
    for file, text in (
        ("setgroups", "deny"),
        ("uid_map", f"0 {user} 1"),
        ("gid_map", f"0 {group} 1"),
    ):
        try:
            Path(f"/proc/self/{file}").write_text(text)
        except OSError as error:
            raise ResourceError(
                f"the kernel refused {text!r} in /proc/self/{file} ({error.strerror})"
            ) from error


def _call_in_thread(do: Callable[[], T]) -> T:
    """Call `do` in a new thread, which takes the namespaces that it enters with it when it ends."""
    with ThreadPoolExecutor(1, "paceline-lab-namespace") as thread:
        return thread.submit(do).result()


def _call_libc(name: str, *arguments: object) -> None:
    """Call a function of the C library that gives 0 or sets errno."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise ResourceError(
            f"the kernel refused {name} ({os.strerror(code)}): run `paceline lab check`, which "
            "says what is missing"
        )
