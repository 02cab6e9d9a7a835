"""Checkpoints that are being written: a folder of their own until all workers have written.

    .saving-x1y2/new/    blocks-00000.safetensors     worker 0 has written its part
                         blocks-00002.safetensors     worker 2 is writing
                         blocks-00000.done            what worker 0 has written, or its error

The first worker waits for all others, and then gives the folder its name.
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
from paceline.checkpoint.files.disk import WrittenFile, block
from paceline.errors import CheckpointError
from paceline.state.blocks import BlockIndex, from_json, to_json

SAVING: Final = ".saving-"
# what removing fails with while a process that is about to end still writes there
_ALIVE: Final = (errno.ENOENT, errno.ENOTEMPTY)
_NAP: Final = 0.01  # seconds between two looks at the folder
_MOST: Final = 1 << 30  # bytes of what a worker says


@dataclass(frozen=True)
class WrittenBlocks:
    """What one worker has written into a checkpoint: its files, and where the tensors are that
    it has blocks of.
    """

    files: dict[str, WrittenFile]
    index: BlockIndex


def reserve(folder: Path) -> Path:
    """Make an empty folder for a new checkpoint, and remove leftovers of killed processes.

    Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    inner = Path(tempfile.mkdtemp(prefix=SAVING, dir=folder)) / "new"
    inner.mkdir()  # with the permissions of any folder: those of mkdtemp are for its owner alone
    return inner


@contextlib.contextmanager
def ending(place: Path) -> Iterator[Path]:
    """Remove what `reserve` has made, after the checkpoint was given its name, or an error.

    After an error other workers may still be writing. The folder gets another name first, so that
    they can't add files while it is removed.
    """
    try:
        yield place
    finally:
        with contextlib.suppress(OSError):  # it has the name of the checkpoint
            place.rename(place.with_name("removed"))
        shutil.rmtree(place.parent, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove the leftovers of a killed process."""
    for path in folder.glob(f"{SAVING}*"):
        try:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        except OSError as error:
            if error.errno not in _ALIVE:
                raise


def leave(
    place: Path,
    number: int,
    layout: BlocksLayout,
    moved: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Write the part of worker `number` into a checkpoint that is being written, and say so there.

    Raises `CheckpointError` where that fails, and leaves the reason for the first worker if it can.
    """
    try:
        written = disk.write(place / layout.file, layout.layout.parts(), moved=moved)
    except OSError as error:
        reason = f"worker {number} can't write its part: {error}"
        with contextlib.suppress(OSError):
            _say(place, number, {"error": reason})
        raise CheckpointError(reason) from error
    try:
        _say(
            place,
            number,
            {"file": layout.file, "written": written._asdict(), "index": to_json(layout.index)},
        )
    except OSError as error:
        raise CheckpointError(
            f"worker {number} can't say that it has written its part: {error}"
        ) from error


def collect(place: Path, numbers: Sequence[int], seconds: float) -> list[WrittenBlocks]:
    """Wait until these workers have left their parts, for this number of seconds at most.

    Raises `CheckpointError` for the first worker that can't.
    """
    end = time.monotonic() + seconds
    found = []
    for number in numbers:
        said = _sign(place, number)
        while not said.exists():
            if time.monotonic() > end:
                raise CheckpointError(
                    f"worker {number} has not written its part of the checkpoint within "
                    f"{seconds:g} s; see what it does, or raise "
                    "start(deadline=seconds) for a disk that is so slow"
                )
            time.sleep(_NAP)
        found.append(_heard(said))
    return found


def _say(place: Path, number: int, what: dict[str, Any]) -> None:
    sign = _sign(place, number)
    half = sign.with_suffix(".half")
    disk.write(half, [block(json.dumps(what).encode())])
    half.replace(sign)


def _heard(sign: Path) -> WrittenBlocks:
    """Read what a worker has said, and remove it: it is no part of the checkpoint."""
    try:
        said = json.loads(disk.read(sign, _MOST))
        sign.unlink()
        if "error" in said:
            raise CheckpointError(said["error"])
        return WrittenBlocks(
            {said["file"]: WrittenFile(**said["written"])}, from_json(said["index"], partial=True)
        )
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"what {sign.stem} says of itself can't be read: {error}") from error


def _sign(place: Path, number: int) -> Path:
    return place / f"blocks-{number:05d}.done"
