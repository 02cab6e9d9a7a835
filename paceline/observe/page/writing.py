"""Writes a page of runs to a file, or explains in one line why that is impossible."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.errors import ResourceError, UsageError
from paceline.observe.page.data import make_page_data
from paceline.observe.page.document import render_page

# Most runs of a page: 6 colours times 6 kinds of dashes tell their lines apart.
MAX_RUNS = 36


def write_page(folders: Sequence[Path], out: Path) -> int:
    """Write the page of some runs to a file, and return its size in bytes.

    Args:
        folders: Folders of the runs.
        out: File to write. It is replaced if it exists.

    Raises:
        UsageError: A folder isn't that of a run, there are too many, or the file can't be written.
        ResourceError: The disk refuses.
    """
    if len(folders) > MAX_RUNS:
        raise UsageError(f"{len(folders)} runs are too many for one page: give {MAX_RUNS} or fewer")
    if out.is_dir():
        raise UsageError(
            f"--html {out} is a folder: give a file in it, such as {out / 'report.html'}"
        )
    if not out.parent.is_dir():
        raise UsageError(
            f"--html {out}: there is no folder {out.parent}; make it first, or give another place"
        )
    text = render_page([make_page_data(folder) for folder in folders])
    try:
        return out.write_bytes(text.encode())
    except PermissionError as error:
        raise UsageError(
            f"--html {out} can't be written ({error.strerror}): give another place"
        ) from error
    except OSError as error:
        raise ResourceError(
            f"--html {out} can't be written ({error.strerror}): free some space, "
            "or give another place"
        ) from error
