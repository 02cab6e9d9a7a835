"""Anonymous Linux namespaces, made in a thread and held open by file descriptors.

A namespace disappears when its last descriptor is closed and its last process has ended.
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
# linux/mount.h
_MS_BIND, _MS_REC, _MS_SLAVE = 1 << 12, 1 << 14, 1 << 19


class NamespaceSet:
    """The namespaces of one host, or the network of a switch.

    Attributes:
        fds: The descriptors that hold the namespaces open, by kind.
        network: Name of the network namespace in /proc, such as `net:[4026532184]`.
    """

    def __init__(self, fds: dict[str, int]) -> None:
        self.fds = fds
        # This name is the same for every process in the namespace.
        self.network = os.readlink(f"/proc/self/fd/{fds['net']}")

    @staticmethod
    def make_namespaces(
        kinds: Sequence[str], prepare: Callable[[], None] = lambda: None
    ) -> NamespaceSet:
        """Make new namespaces of these kinds.

        Args:
            kinds: Keys of `KINDS`.
            prepare: Called once inside the new namespaces. Default: does nothing.

        Raises:
            ResourceError: The kernel refuses to make them.
        """

        def open_descriptors() -> dict[str, int]:
            unshare_thread(kinds)
            prepare()
            # Open descriptors keep the namespaces alive after this thread has ended.
            return {
                kind: os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
                for kind in kinds
            }

        return NamespaceSet(_call_in_thread(open_descriptors))

    def call_inside(self, do: Callable[[], T]) -> T:
        """Call `do` inside this network.

        It runs in a new thread, so that the calling thread stays where it is. Errors in that thread
        are raised here.
        """

        def enter_and_call() -> T:
            _call_libc("setns", self.fds["net"], KINDS["net"])
            return do()

        return _call_in_thread(enter_and_call)

    def close(self) -> None:
        """Close the descriptors, so that the namespaces end with the last process in them.

        A second call does nothing.
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
    """Make the function that turns new namespaces into a host.

    The host gets its own name, its own shared memory, and the file `names` as its /etc/hosts.
    """

    def prepare() -> None:
        socket.sethostname(hostname)
        # Without this, the mounts below would also appear outside of the host.
        _call_libc("mount", b"none", b"/", None, _MS_REC | _MS_SLAVE, None)
        if os.path.isdir("/dev/shm"):
            _call_libc("mount", b"paceline-lab", b"/dev/shm", b"tmpfs", 0, b"mode=1777")
        if os.path.exists("/etc/hosts"):
            _call_libc("mount", os.fsencode(names), b"/etc/hosts", None, _MS_BIND, None)

    return prepare


def become_root() -> None:
    """Enter a user namespace in which this process is root.

    The process must have a single thread, and it can't leave the namespace again. Outside of the
    namespace its rights are the same as before.
    """
    user, group = os.geteuid(), os.getegid()
    # The kernel counts a joined thread until it has really ended, and refuses a process with two.
    deadline = time.monotonic() + _THREAD_SECONDS
    while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    unshare_thread(["user"])
    # The order matters: an ordinary user may map a group only after setgroups is denied.
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
    """Call `do` in a new thread, whose change of namespaces ends with it."""
    with ThreadPoolExecutor(1, "paceline-lab-namespace") as thread:
        return thread.submit(do).result()


def _call_libc(name: str, *arguments: object) -> None:
    """Call a function of the C library that returns 0 or sets errno."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise ResourceError(
            f"the kernel refused {name} ({os.strerror(code)}): run `paceline lab check`, which "
            "says what is missing"
        )
