"""Sleeps until a number in shared memory changes (futex(2)): whoever changes it wakes the
sleepers, of all processes.
"""

from __future__ import annotations

import ctypes
import platform

_WAIT, _WAKE, _ALL = 0, 1, 2**31 - 1
# the number of the system call
_CALL = {"x86_64": 202, "AMD64": 202, "aarch64": 98}.get(platform.machine())
_system = ctypes.CDLL(None).syscall
_system.restype = ctypes.c_long
_system.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def available() -> bool:
    """Whether this machine has futexes that are known here."""
    return platform.system() == "Linux" and _CALL is not None


def wait(address: int, value: int, seconds: float) -> None:
    """Return when the 32 bits at `address` may differ from `value` (its low 32 bits count);
    after so many seconds in any case.
    """
    span = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    _system(_CALL, address, _WAIT, value & 0xFFFFFFFF, ctypes.addressof(span))


def wake(address: int) -> None:
    """Wake all that wait at `address`, after the number there was changed."""
    _system(_CALL, address, _WAKE, _ALL, None)
