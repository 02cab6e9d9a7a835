"""The call site in a user's script: which frames of a stack are its own, and not ours or torch's.

Looked at only after a failure.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

_HERE = str(Path(__file__).parent)
# written as a user would
_PROGRAMS = tuple(os.path.join(_HERE, name) + os.sep for name in ("apps", "bench"))
_STANDARD = os.path.dirname(contextlib.__file__) + os.sep
_INSIDE = (_HERE + os.sep, contextlib.__file__, "<frozen ")


def foreign(file: str) -> bool:
    """Whether a frame of this file is not the user's: paceline's own, or torch's."""
    return file.startswith(_INSIDE + _torch()) and not file.startswith(_PROGRAMS)


def scripted(file: str) -> bool:
    """Whether a file belongs to the user's script, and not to a library."""
    return (
        not foreign(file)
        and not file.startswith(_STANDARD)
        and f"{os.sep}site-packages{os.sep}" not in file
    )


def place() -> str:
    """Return the innermost line of the user's on this thread's stack, as ` (train.py:12)`; empty
    where there is none.
    """
    frame = sys._getframe(1)
    while foreign(frame.f_code.co_filename):
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    file = frame.f_code.co_filename
    beside = (
        os.path.relpath(file)
        if os.path.isabs(file) and file.startswith(os.getcwd() + os.sep)
        else file
    )
    return f" ({beside}:{frame.f_lineno})"


def _torch() -> tuple[str, ...]:
    torch = sys.modules.get("torch")
    return (
        ()
        if torch is None or torch.__file__ is None
        else (os.path.dirname(torch.__file__) + os.sep,)
    )
