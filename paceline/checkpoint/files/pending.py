"""Keeps a checkpoint in a temporary folder until all workers have written their parts.

    .saving-x1y2/new/    blocks-00000.safetensors     worker 0 has written its part
                         blocks-00002.safetensors     worker 2 is writing
                         blocks-00000.done            note of worker 0: its files, or its error

The first worker waits for the notes of all workers, and then renames the folder.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.checkpoint.files import disk
from paceline.checkpoint.files.block_files import BlocksLayout
from paceline.checkpoint.files.disk import WrittenFile, to_byte_tensor
from paceline.errors import CheckpointError
from paceline.state.blocks import BlockIndex, index_from_json, index_to_json

SAVING_PREFIX: Final = ".saving-"
# Errors of removing a folder while a process that is about to end still writes to it.
_BUSY_FOLDER_ERRORS: Final = (errno.ENOENT, errno.ENOTEMPTY)
_POLL_INTERVAL: Final = 0.01  # seconds between two looks at the folder
_MAX_NOTE_BYTES: Final = 1 << 30  # bytes of a worker's note


@dataclass(frozen=True)
class WrittenBlocks:
    """The files that one worker has written, and the places of the blocks in them."""

    files: dict[str, WrittenFile]
    index: BlockIndex


def reserve_folder(folder: Path) -> Path:
    """Make an empty folder for a new checkpoint, and remove leftovers of killed processes.

    Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    # Only the owner can read the folder of mkdtemp. The inner one has the usual permissions, and
    # becomes the checkpoint.
    inner_folder = Path(tempfile.mkdtemp(prefix=SAVING_PREFIX, dir=folder)) / "new"
    inner_folder.mkdir()
    return inner_folder


@contextlib.contextmanager
def remove_afterwards(place: Path) -> Iterator[Path]:
    """Remove the folders of `reserve_folder` at the end of the block, also after an error.

    After an error other workers may still be writing. The folder gets another name first, so that
    they can't add files while it is removed.
    """
    try:
        yield place
    finally:
        # After a success the folder has the name of the checkpoint, and this rename fails.
        with contextlib.suppress(OSError):
            place.rename(place.with_name("removed"))
        shutil.rmtree(place.parent, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Remove the leftovers of processes that were killed."""
    for path in folder.glob(f"{SAVING_PREFIX}*"):
        try:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        except OSError as error:
            if error.errno not in _BUSY_FOLDER_ERRORS:
                raise


def write_part(
    place: Path,
    number: int,
    layout: BlocksLayout,
    moved: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Write the part of a worker, and a note about it.

    If writing fails, the note has the reason, so that the first worker doesn't wait in vain.

    Args:
        place: Temporary folder of the checkpoint.
        number: Rank of the worker.
        layout: The part.
        moved: Called with the number of bytes as they are written.

    Raises:
        CheckpointError: The part or its note couldn't be written.
    """
    try:
        written = disk.write_file(place / layout.file, layout.layout.iterate_bytes(), moved=moved)
    except OSError as error:
        reason = f"worker {number} can't write its part: {error}"
        with contextlib.suppress(OSError):
            _write_note(place, number, {"error": reason})
        raise CheckpointError(reason) from error
    try:
        _write_note(
            place,
            number,
            {
                "file": layout.file,
                "written": written._asdict(),
                "index": index_to_json(layout.index),
            },
        )
    except OSError as error:
        raise CheckpointError(
            f"worker {number} has written its part, but can't write the note about it: {error}"
        ) from error


def collect_parts(place: Path, numbers: Sequence[int], seconds: float) -> list[WrittenBlocks]:
    """Wait until workers have written their parts.

    Args:
        place: Temporary folder of the checkpoint.
        numbers: Ranks of the workers.
        seconds: Most seconds to wait.

    Raises:
        CheckpointError: A worker has failed, or has written no note in time.
    """
    deadline = time.monotonic() + seconds
    contents = []
    for rank in numbers:
        note_path = _note_path(place, rank)
        while not note_path.exists():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"worker {rank} has not written its part of the checkpoint within "
                    f"{seconds:g} s; check whether that worker hangs, or raise "
                    "start(deadline=seconds) if the disk is slow"
                )
            time.sleep(_POLL_INTERVAL)
        contents.append(_read_note(note_path))
    return contents


def _write_note(place: Path, rank: int, fields: dict[str, Any]) -> None:
    # The first worker polls for the note. The rename makes sure that it never reads half of one.
    note_path = _note_path(place, rank)
    half_path = note_path.with_suffix(".half")
    disk.write_file(half_path, [to_byte_tensor(json.dumps(fields).encode())])
    half_path.replace(note_path)


def _read_note(path: Path) -> WrittenBlocks:
    """Read the note of a worker, and remove it, as it is no part of the checkpoint."""
    try:
        note = json.loads(disk.read_file(path, _MAX_NOTE_BYTES))
        path.unlink()
        if "error" in note:
            raise CheckpointError(note["error"])
        return WrittenBlocks(
            {note["file"]: WrittenFile(**note["written"])},
            index_from_json(note["index"], partial=True),
        )
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"the note {path.name} can't be read: {error}") from error


def _note_path(place: Path, rank: int) -> Path:
    return place / f"blocks-{rank:05d}.done"
