"""Lists the checkpoints of a folder: the newest, the best, and the ones to remove.

    serial      1         2         3         4         5
    metric     0.31      0.21                nan       0.24        best="min"
                          best                         newest      keep=2: folders 2, 4 and 5 stay

All of this is read from the manifests, so all readers of the folder get the same answers.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.files import manifest, pending
from paceline.checkpoint.files.manifest import (
    FOLDER_NAME,
    Best,
    BrokenCheckpoint,
    Metric,
    NewerCheckpoint,
)
from paceline.errors import CheckpointError


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint in its folder.

    Attributes:
        path: Folder of the checkpoint.
        serial: Place in the order of saving. None if the manifest can't be read.
        is_newer: Whether a newer version of paceline wrote it.
        metric: Metric of the checkpoint, if it has one.
    """

    path: Path
    serial: int | None
    is_newer: bool = False
    metric: Metric | None = None

    @property
    def step(self) -> int:
        """Step of the checkpoint, from the name of its folder."""
        return manifest.parse_step(self.path)

    @property
    def newest_first_key(self) -> tuple[bool, int, str]:
        """Sort key by age. Unreadable entries count as newer than all others."""
        return self.serial is None, self.serial or 0, self.path.name

    @property
    def oldest_first_key(self) -> tuple[int, str]:
        """Sort key by age. Unreadable entries count as older than all others."""
        return self.serial or 0, self.path.name


def list_newest(folder: Path) -> list[Path]:
    """List the checkpoints in `folder`, newest first. Unreadable ones count as the newest."""
    return [
        entry.path
        for entry in sorted(
            list_entries(folder), key=lambda entry: entry.newest_first_key, reverse=True
        )
    ]


def list_best(folder: Path) -> list[CheckpointEntry]:
    """List the checkpoints in `folder` that were saved with a metric, best first."""
    return rank_by_metric(list_entries(folder))


def find_direction(checkpoints: Iterable[CheckpointEntry]) -> Best | None:
    """Find whether the smallest or the largest metric is the best: the newest metric decides.

    None if no checkpoint was saved with a metric.
    """
    newest_entry = max(
        (entry for entry in checkpoints if entry.metric is not None),
        key=lambda entry: entry.oldest_first_key,
        default=None,
    )
    return None if newest_entry is None or newest_entry.metric is None else newest_entry.metric.best


def rank_by_metric(checkpoints: Sequence[CheckpointEntry]) -> list[CheckpointEntry]:
    """Sort the checkpoints with a metric, best first. Of equal ones the older one comes first."""
    direction, ranked = find_direction(checkpoints), list[tuple[float, int, str, CheckpointEntry]]()
    for entry in checkpoints:
        if entry.metric is not None and entry.metric.is_finite and entry.metric.best == direction:
            ranked.append((entry.metric.sort_key, *entry.oldest_first_key, entry))
    return [entry for *_, entry in sorted(ranked, key=lambda item: item[:-1])]


def list_excess(checkpoints: Sequence[CheckpointEntry], latest: Path, keep: int) -> list[Path]:
    """List the checkpoints to be removed: all but the `keep` newest and the best.

    `latest` counts as the newest, and checkpoints that can't be read as the oldest. Checkpoints of
    a newer paceline are never removed.
    """
    to_keep = {latest, *(entry.path for entry in rank_by_metric(checkpoints)[:1])}
    older_ones = sorted(
        (entry for entry in checkpoints if entry.path != latest and not entry.is_newer),
        key=lambda entry: entry.oldest_first_key,
        reverse=True,
    )
    return [entry.path for entry in older_ones[keep - 1 :] if entry.path not in to_keep]


def prune_checkpoints(folder: Path, latest: Path, keep: int) -> None:
    """Remove all checkpoints but the `keep` newest and the best. `latest` counts as the newest.

    Raises OSError.
    """
    for path in list_excess(list_entries(folder), latest, keep):
        trash = Path(tempfile.mkdtemp(prefix=pending.SAVING_PREFIX, dir=folder))
        # The rename hides it in one step: a checkpoint that is half removed must not be taken for a
        # complete one.
        path.rename(trash / "old")
        shutil.rmtree(trash)


def choose_free_path(folder: Path, step: int) -> Path:
    """Choose an unused name for the checkpoint of `step`.

    An old checkpoint is never replaced: it would be lost if the process were killed in between.
    """
    name = f"step-{step:08d}"
    suffixes = itertools.count(2)
    # Not `exists`, which is False for a link to nowhere.
    while os.path.lexists(folder / name):
        name = f"step-{step:08d}.{next(suffixes)}"
    return folder / name


def list_entries(folder: Path) -> list[CheckpointEntry]:
    """List the checkpoints in `folder`, in no order.

    Raises `CheckpointError` if the folder can't be read.
    """
    try:
        return [
            _read_entry(path)
            for path in folder.iterdir()
            if FOLDER_NAME.fullmatch(path.name) and path.is_dir()
        ]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(
            f"the checkpoints in {folder} can't be listed ({error.strerror})"
        ) from error


def _read_entry(path: Path) -> CheckpointEntry:
    try:
        fields = manifest.read_manifest(path)
    except NewerCheckpoint as newer:
        return CheckpointEntry(path, newer.serial, is_newer=True)
    except BrokenCheckpoint:
        return CheckpointEntry(path, None)
    serial = fields.get("serial")
    return CheckpointEntry(
        path, serial if type(serial) is int else None, metric=Metric.from_manifest(fields)
    )
