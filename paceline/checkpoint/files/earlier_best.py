"""Takes the best checkpoint of an earlier run along into the folder of the run that resumed.

    runs/circle/checkpoints/step-00000300      the best so far, 0.21
    runs/circle-2/checkpoints/step-00000300    the same files, by a second name if the file
                                               system has links, else copies of them
                              step-00000900    saved by circle-2: a worse one, 0.24

Without it a run would call a checkpoint its best that is worse than the one it began with.
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

OLDEST = 0  # the serial of what was taken along: it is older than all that the run saves itself
_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)


def inherit(folder: Path, earlier: Path) -> Path | None:
    """Bring the best checkpoint of the folder `earlier` to `folder`, which has newer ones; return
    its path there.

    None where no checkpoint of `earlier` is better than those of `folder`, or has another metric.

    Raises `CheckpointError` for files that can't be linked or copied; nothing half-copied stays.
    """
    found = catalogue.best(earlier)
    if not found:
        return None
    here, old = catalogue.entries(folder), found[0]
    asked = catalogue.direction(here)
    if old.metric is None or (asked is not None and old.metric.best != asked):
        return None  # measured by something else
    known = catalogue.by_metric(here)
    if (
        known
        and known[0].metric is not None
        and (known[0].metric.rank, known[0].step) <= (old.metric.rank, old.step)
    ):
        return None
    try:
        with pending.ending(pending.reserve(folder)) as place:
            _copy(old.path, place)
            target = catalogue.free(folder, old.step)
            place.rename(target)
        disk.sync(folder)
    except (OSError, Broken) as error:
        raise CheckpointError(
            f"the best checkpoint so far, {old.path}, can't be taken along to {folder}: {error}"
        ) from error
    return target


def _copy(path: Path, place: Path) -> None:
    """Give all files of a checkpoint a second name in `place`, with a manifest that says it is
    the oldest. Raises `Broken`, `OSError`.
    """
    head = manifest.read(path)
    _, _, files = manifest.contents(path, head)
    for file in files:
        _link(path / file, place / file)
    disk.write(place / MANIFEST, [block(manifest.sealed({**head, "serial": OLDEST}))])
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
