"""Writes a page of runs to a file, or says in a line why that can't be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.errors import ResourceError, UsageError
from paceline.observe.page.data import page_data
from paceline.observe.page.document import page

MOST = 36  # runs: as many lines as colours and dashes tell apart


def write(folders: Sequence[Path], out: Path) -> int:
    """Write the page of the runs in these folders to `out`, which is replaced if it is there;
    return its size in bytes.

    Raises UsageError for a folder that is of no run, and for a place that can't be written.
    """
    if len(folders) > MOST:
        raise UsageError(f"{len(folders)} runs are too many for one page: give {MOST} or fewer")
    if out.is_dir():
        raise UsageError(
            f"--html {out} is a folder: give a file in it, such as {out / 'report.html'}"
        )
    if not out.parent.is_dir():
        raise UsageError(
            f"--html {out}: there is no folder {out.parent}; make it first, or give another place"
        )
    text = page([page_data(folder) for folder in folders])
    try:
        return out.write_bytes(text.encode())
    except PermissionError as error:
        raise UsageError(
            f"--html {out} can't be written ({error.strerror}): give another place"
        ) from error
    except OSError as error:
        raise ResourceError(
            f"--html {out} can't be written ({error.strerror}): free some space, or give another "
            "place"
        ) from error
