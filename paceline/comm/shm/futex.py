"""Sleeps until a number in shared memory changes, and wakes sleepers of all processes: futex(2)."""

from __future__ import annotations

import ctypes
import platform

_WAIT, _WAKE, _ALL = 0, 1, 2**31 - 1  # operations of the call, and a number of sleepers
# Number of the system call. The C library has no function for it.
_CALL = {"x86_64": 202, "AMD64": 202, "aarch64": 98}.get(platform.machine())
_system = ctypes.CDLL(None).syscall
_system.restype = ctypes.c_long
_system.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def has_futex() -> bool:
    """Whether this machine has futexes whose system call is known here."""
    return platform.system() == "Linux" and _CALL is not None


def futex_wait(address: int, value: int, seconds: float) -> None:
    """Sleep while the 32 bits at `address` are the low 32 bits of `value`, at most `seconds`.

    The kernel compares and goes to sleep in one step, so a wake-up in between is not missed. It may
    return early: the caller checks its condition again.
    """
    span = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    _system(_CALL, address, _WAIT, value & 0xFFFFFFFF, ctypes.addressof(span))


def futex_wake(address: int) -> None:
    """Wake all sleepers at `address`. Change the number there first."""
    _system(_CALL, address, _WAKE, _ALL, None)
