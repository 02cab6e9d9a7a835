"""The functions of the C library, with the types of their arguments.

Pointers are addresses, as integers; Python keeps their memory alive. Each function is described in
the C source.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_double, c_float, c_int, c_int64, c_uint32, c_void_p
from functools import lru_cache
from typing import Any

from paceline.native.library import load_library, load_library_with_gil

# name: (type of the result, types of the arguments)
_Signatures = dict[str, tuple[Any, list[Any]]]

# Functions that may wait or take long. They release the GIL: other threads of Python run meanwhile.
_LONG: _Signatures = {
    "wait": (c_int, [c_void_p, c_int, c_int64, c_int64]),
    "advance": (c_int64, [c_void_p]),
    "finish": (c_int64, [c_void_p, c_int64]),
    "begin_all_reduce": (
        None,
        [c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int, c_int],
    ),
    "begin_reduce_scatter": (
        None,
        [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int, c_int],
    ),
    "begin_messages": (None, [c_void_p, c_void_p, c_void_p, c_int64]),
    "reduce": (c_int, [c_void_p, c_int, c_void_p, c_int, c_int64, c_int, c_int]),
    "copy_scaled": (c_int, [c_void_p, c_int64, c_int, c_double]),
    "futex_wait": (None, [c_void_p, c_uint32, c_int64]),
    "encode": (c_int, [c_int, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p]),
    "decode": (c_int, [c_int, c_void_p, c_int64, c_int64, c_void_p, c_void_p]),
    "decode_add": (c_int, [c_int, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_float]),
    "find_large": (c_int64, [c_void_p, c_int64, c_float, c_void_p, c_int64]),
    "mesh_send": (
        c_int64,
        [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_int64, c_int],
    ),
    "mesh_wait_change": (c_int, [c_void_p, c_uint32, c_int64]),
    "schedule_begin": (c_void_p, [c_void_p, c_void_p, c_int64, c_void_p, c_void_p]),
    "schedule_wait": (c_int64, [c_void_p, c_int64]),
    "schedule_poll": (c_int64, [c_void_p]),
    "schedule_free": (None, [c_void_p]),
    "mesh_close": (None, [c_void_p]),
    "mesh_free": (None, [c_void_p]),
}
# Functions of a microsecond. They keep the GIL: releasing it takes longer than they do.
_SHORT: _Signatures = {
    "open_segment": (None, [c_void_p, c_void_p, c_int64, c_int64]),
    "segment_bytes": (c_int64, [c_int64]),
    "post": (c_int64, [c_void_p]),
    "has_reached": (c_int, [c_void_p, c_int, c_int64]),
    "find_behind": (c_int64, [c_void_p, c_int, c_int64, c_void_p]),
    "interrupt": (None, [c_void_p]),
    "begin_meeting": (c_int64, [c_void_p, c_int64, c_void_p, c_int64]),
    "marks_agree": (c_int, [c_void_p, c_int64, c_int64]),
    "post_mail": (c_int64, [c_void_p, c_int64, c_void_p, c_int64, c_int64]),
    "read_mail_heads": (None, [c_void_p, c_int64, c_void_p, c_void_p]),
    "leave": (None, [c_void_p]),
    "has_left": (c_int, [c_void_p, c_int64]),
    "set_pid": (None, [c_void_p, c_int64]),
    "get_pid": (c_int64, [c_void_p, c_int64]),
    "write_note": (None, [c_void_p, c_void_p, c_int64]),
    "read_note": (c_int64, [c_void_p, c_int64, c_void_p]),
    "operation_bytes": (c_int64, []),
    "begin_small": (
        c_int64,
        [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p],
    ),
    "advance_short": (c_int64, [c_void_p]),  # pl_advance of an operation that takes no time
    "set_arrivals": (None, [c_void_p, c_void_p, c_int64, c_int64]),
    "load": (c_int64, [c_void_p]),
    "store": (None, [c_void_p, c_int64]),
    "futex_wake": (None, [c_void_p]),
    "mesh_open": (c_void_p, [c_int]),
    "mesh_add": (c_int64, [c_void_p, c_int, c_int64]),
    "mesh_state": (c_int, [c_void_p, c_int64]),
    "mesh_ended": (c_int, [c_void_p]),
    "mesh_sent": (c_int64, [c_void_p, c_int64]),
    "mesh_expect": (c_int, [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64]),
    "mesh_take": (c_int, [c_void_p, c_void_p]),
    "mesh_give_back": (None, [c_void_p]),
    "mesh_changes": (c_uint32, [c_void_p]),
    "mesh_wake": (None, [c_void_p]),
    "schedule_state": (c_int64, [c_void_p]),
    "schedule_progress": (None, [c_void_p, c_void_p]),
}
_SYMBOLS = {"advance_short": "pl_advance"}  # functions that have another name in C


class NativeFunctions:
    """The functions of the C library, without the prefix `pl_`."""

    def __init__(self) -> None:
        for signatures, library in ((_LONG, load_library()), (_SHORT, load_library_with_gil())):
            for name, (result, arguments) in signatures.items():
                function = getattr(library, _SYMBOLS.get(name, f"pl_{name}"))
                function.restype, function.argtypes = result, arguments
                setattr(self, name, function)

    def __getattr__(self, name: str) -> Callable[..., Any]:  # for type checkers
        raise AttributeError(f"the C library has no function pl_{name}")


@lru_cache(maxsize=1)
def load_functions() -> NativeFunctions:
    """Load the C library once in a process."""
    return NativeFunctions()


def address_of(buffer: Any) -> int:
    """Address of a ctypes object, which must stay alive as long as C uses it."""
    return ctypes.addressof(buffer)


def address_of_bytes(data: bytes) -> int:
    """Address of bytes, which must stay alive as long as C reads them."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
