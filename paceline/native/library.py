"""Loads the C library that build.py compiles."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import TypeVar

from paceline.errors import ResourceError

PATH = Path(__file__).with_name("_core.so")
VERSION = 1  # PL_VERSION in core.h
REPAIR = "run `pip install -e .` or `python -m paceline.native.build` in paceline's source tree"

Library = TypeVar("Library", bound=ctypes.CDLL)


def has_library() -> bool:
    """Whether there is a C library for this system."""
    return sys.platform == "linux"


@cache
def load_library() -> ctypes.CDLL:
    """Load the library for calls that release the GIL: those that wait, or take milliseconds.

    Raises:
        ResourceError: The library is missing, can't be loaded, or is of other sources.
    """
    return _load_checked(ctypes.CDLL)


@cache
def load_library_with_gil() -> ctypes.PyDLL:
    """Load the library for short calls, which keep the GIL: giving it up costs more than they do.

    Raises:
        ResourceError: See `load_library`.
    """
    return _load_checked(ctypes.PyDLL)


def _load_checked(kind: type[Library]) -> Library:
    if not has_library():
        raise ResourceError(f"on {sys.platform} paceline has no C library: it is for Linux")
    if not PATH.exists():
        raise ResourceError(f"paceline's C library {PATH} is missing; {REPAIR}")
    try:
        library = kind(str(PATH))
    except OSError as error:
        raise ResourceError(f"paceline's C library can't be loaded: {error}; {REPAIR}") from error
    version = library.pl_version()
    if version != VERSION:
        raise ResourceError(
            f"paceline's C library {PATH} has version {version}, wanted is {VERSION}; {REPAIR}"
        )
    return library
