"""Finds the line of a user's script in a stack, between the frames of paceline and torch.

Used only after a failure, so it need not be fast.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

_PACKAGE_FOLDER = str(Path(__file__).parent)
# Programs inside the package that are written as a user would write them.
_PROGRAM_PREFIXES = tuple(
    os.path.join(_PACKAGE_FOLDER, name) + os.sep for name in ("apps", "bench")
)
_STANDARD_LIBRARY_PREFIX = os.path.dirname(contextlib.__file__) + os.sep
_INTERNAL_PREFIXES = (_PACKAGE_FOLDER + os.sep, contextlib.__file__, "<frozen ")


def is_library_file(file: str) -> bool:
    """Whether a file belongs to paceline or torch, and not to the user."""
    return file.startswith(_INTERNAL_PREFIXES + _find_torch_prefix()) and not file.startswith(
        _PROGRAM_PREFIXES
    )


def is_user_file(file: str) -> bool:
    """Whether a file belongs to the user's program, and not to any library."""
    return (
        not is_library_file(file)
        and not file.startswith(_STANDARD_LIBRARY_PREFIX)
        and f"{os.sep}site-packages{os.sep}" not in file
    )


def find_user_line() -> str:
    """Find the innermost line of the user's code on this thread's stack, as ` (train.py:12)`.

    Empty if all frames belong to libraries.
    """
    frame = sys._getframe(1)
    while is_library_file(frame.f_code.co_filename):
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    file = frame.f_code.co_filename
    # Files below the working folder are shown by their relative path.
    shown = (
        os.path.relpath(file)
        if os.path.isabs(file) and file.startswith(os.getcwd() + os.sep)
        else file
    )
    return f" ({shown}:{frame.f_lineno})"


def _find_torch_prefix() -> tuple[str, ...]:
    # Not imported for this: a process without torch has no frames of torch.
    torch = sys.modules.get("torch")
    return (
        ()
        if torch is None or torch.__file__ is None
        else (os.path.dirname(torch.__file__) + os.sep,)
    )
