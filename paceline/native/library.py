"""Loads the C library that build.py compiles."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

from paceline.errors import ResourceError, UsageError
from paceline.native import build

VERSION = 3  # PL_VERSION in core.h


def has_library() -> bool:
    """Whether there is a C library for this system."""
    return build.SUPPORTED


@cache
def load_library() -> ctypes.CDLL:
    """Load the library for calls that release the GIL: calls that wait, or take milliseconds.

    Raises:
        UsageError: The library is missing, can't be loaded, or is of other sources.
        ResourceError: There is none for this system.
    """
    if not has_library():
        raise ResourceError(f"on {sys.platform} paceline has no C library: it is for Linux")
    path = build.LIBRARY
    # A wheel has no sources, so the stamp is checked in a clone only.
    in_source_tree = bool(build.list_sources())
    repair = f"run `python {build.__file__}`" if in_source_tree else "install paceline again"
    if not path.exists():
        raise UsageError(f"paceline's C library {path} is missing; {repair}")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise UsageError(f"paceline's C library can't be loaded: {error}; {repair}") from error
    version = library.pl_version()
    if version != VERSION:
        raise UsageError(
            f"paceline's C library {path} has version {version}, wanted is {VERSION}; {repair}"
        )
    library.pl_stamp.restype = ctypes.c_char_p
    if in_source_tree and not library.pl_stamp().startswith(build.stamp_sources().encode()):
        raise UsageError(f"paceline's C library {path} is of other sources; {repair}")
    return library


@cache
def load_library_with_gil() -> ctypes.PyDLL:
    """Load the library for short calls, which keep the GIL: releasing it takes longer than they do.

    Raises:
        UsageError: See `load_library`, which checks the library.
    """
    load_library()
    return ctypes.PyDLL(str(build.LIBRARY))
