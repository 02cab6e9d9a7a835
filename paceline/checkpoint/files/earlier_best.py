"""Copies the best checkpoint of an earlier run into the folder of the run that resumed it.

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
from paceline.checkpoint.files.disk import to_byte_tensor
from paceline.checkpoint.files.manifest import MANIFEST_FILE, BrokenCheckpoint
from paceline.errors import CheckpointError

INHERITED_SERIAL = 0  # older than the serials of all checkpoints that the run saves itself
_LINK_UNSUPPORTED = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)


def inherit_best(folder: Path, earlier: Path) -> Path | None:
    """Copy the best checkpoint of `earlier` to `folder`, if `folder` has no better one.

    Args:
        folder: Checkpoints of the run that resumed.
        earlier: Checkpoints of the run that was resumed.

    Returns:
        Its new path. None if it isn't better, or if it was saved with the other `best`.

    Raises:
        CheckpointError: Files can't be linked or copied. No half-copied checkpoint stays.
    """
    ranked = catalogue.list_best(earlier)
    if not ranked:
        return None
    current, inherited = catalogue.list_entries(folder), ranked[0]
    direction = catalogue.find_direction(current)
    # Metrics of the other direction can't be compared.
    if inherited.metric is None or (direction is not None and inherited.metric.best != direction):
        return None
    # A checkpoint that is as good stays. It may be the same one, from an earlier resume.
    current_ranked = catalogue.rank_by_metric(current)
    if (
        current_ranked
        and current_ranked[0].metric is not None
        and (current_ranked[0].metric.sort_key, current_ranked[0].step)
        <= (inherited.metric.sort_key, inherited.step)
    ):
        return None
    try:
        with pending.remove_afterwards(pending.reserve_folder(folder)) as place:
            _copy_checkpoint(inherited.path, place)
            target = catalogue.choose_free_path(folder, inherited.step)
            place.rename(target)
        disk.sync_folder(folder)
    except (OSError, BrokenCheckpoint) as error:
        raise CheckpointError(
            f"the best checkpoint so far, {inherited.path}, can't be copied to {folder}: {error}"
        ) from error
    return target


def _copy_checkpoint(path: Path, place: Path) -> None:
    """Link all files of a checkpoint to `place`, and write a manifest with the lowest serial.

    Raises `BrokenCheckpoint` or `OSError`.
    """
    # Files never change once they are written, so hard links are safe. Only the manifest is new.
    fields = manifest.read_manifest(path)
    _, _, files = manifest.parse_contents(path, fields)
    for file in files:
        _link_or_copy(path / file, place / file)
    disk.write_file(
        place / MANIFEST_FILE,
        [to_byte_tensor(manifest.seal_manifest({**fields, "serial": INHERITED_SERIAL}))],
    )
    disk.sync_folder(place)


def _link_or_copy(source: Path, target: Path) -> None:
    if not stat.S_ISREG(source.lstat().st_mode):
        raise OSError(
            errno.EINVAL, f"{source} is no file, but a link, a folder, a pipe or a device"
        )
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _LINK_UNSUPPORTED:
            raise
        shutil.copyfile(source, target, follow_symlinks=False)
        disk.sync_folder(target)
