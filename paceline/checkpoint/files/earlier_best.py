"""Takes the best checkpoint of an earlier run along, into the folder of the run that resumed it.

    runs/circle/checkpoints/step-00000300      the best so far, 0.21
    runs/circle-2/checkpoints/step-00000300    hard links to the same files, or copies if the file
                                               system has no links
                              step-00000900    saved by circle-2: a worse one, 0.24

Otherwise the best checkpoint of a run could be worse than the one with which it began.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

from paceline.checkpoint.files import catalogue, disk, manifest, pending
from paceline.checkpoint.files.disk import block
from paceline.checkpoint.files.manifest import MANIFEST, Broken
from paceline.errors import CheckpointError

OLDEST = 0  # older than the serials of all checkpoints that the run saves itself
_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)


def inherit(folder: Path, earlier: Path) -> Path | None:
    """Copy the best checkpoint of `earlier` to `folder`, if it is better than those in `folder`.

    Returns its new path. None if it isn't better, or if it was saved with the other `best`. Raises
    `CheckpointError` if files can't be linked or copied. Nothing half-copied stays.
    """
    ranked = catalogue.best(earlier)
    if not ranked:
        return None
    current, inherited = catalogue.entries(folder), ranked[0]
    wanted = catalogue.direction(current)
    if inherited.metric is None or (wanted is not None and inherited.metric.best != wanted):
        return None  # it was measured in the other direction
    current_ranked = catalogue.by_metric(current)
    if (
        current_ranked
        and current_ranked[0].metric is not None
        and (current_ranked[0].metric.rank, current_ranked[0].step)
        <= (inherited.metric.rank, inherited.step)
    ):
        return None
    try:
        with pending.ending(pending.reserve(folder)) as place:
            _copy(inherited.path, place)
            target = catalogue.free(folder, inherited.step)
            place.rename(target)
        disk.sync(folder)
    except (OSError, Broken) as error:
        raise CheckpointError(
            f"the best checkpoint so far, {inherited.path}, can't be copied to {folder}: {error}"
        ) from error
    return target


def _copy(path: Path, place: Path) -> None:
    """Link all files of a checkpoint to `place`, and write a manifest with the lowest serial.

    Raises `Broken` or `OSError`.
    """
    fields = manifest.read(path)
    _, _, files = manifest.contents(path, fields)
    for file in files:
        _link(path / file, place / file)
    disk.write(place / MANIFEST, [block(manifest.sealed({**fields, "serial": OLDEST}))])
    disk.sync(place)


def _link(source: Path, target: Path) -> None:
    if not stat.S_ISREG(source.lstat().st_mode):
        raise OSError(
            errno.EINVAL, f"{source} is no file, but a link, a folder, a pipe or a device"
        )
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(source, target, follow_symlinks=False)
        disk.sync(target)
