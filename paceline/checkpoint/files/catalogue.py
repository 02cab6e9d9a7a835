"""The checkpoints of a folder, in order: the newest, the best, and the ones to remove.

    serial      1         2         3         4         5
    metric     0.31      0.21                nan       0.24        best="min"
                          best                         newest      with keep=2 the folders 2, 4 and
                                                                   5 stay

All of it is read from the manifests, so every reader of the folder finds the same.
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
from paceline.checkpoint.files.manifest import NAME, Best, Broken, Metric, Newer
from paceline.errors import CheckpointError


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint in its folder.

    `serial`: its place in the order of saving, None if that can't be read.
    """

    path: Path
    serial: int | None
    newer: bool = False  # than this paceline
    metric: Metric | None = None

    @property
    def step(self) -> int:
        """The step that it is of."""
        return manifest.step_of(self.path)

    @property
    def age(self) -> tuple[bool, int, str]:
        """The key to sort by: entries that can't be read count as newer than all others."""
        return self.serial is None, self.serial or 0, self.path.name

    @property
    def place(self) -> tuple[int, str]:
        """The key to sort by where entries that can't be read count as older than all others."""
        return self.serial or 0, self.path.name


def newest(folder: Path) -> list[Path]:
    """List the checkpoints in `folder`, newest first; unreadable manifests count as newest."""
    return [
        entry.path for entry in sorted(entries(folder), key=lambda entry: entry.age, reverse=True)
    ]


def best(folder: Path) -> list[CheckpointEntry]:
    """List those checkpoints in `folder` that were saved with a metric, the best first."""
    return by_metric(entries(folder))


def direction(found: Iterable[CheckpointEntry]) -> Best | None:
    """Whether the smallest or the largest metric is the best; None if none was saved with a
    metric.
    """
    last = max(
        (entry for entry in found if entry.metric is not None),
        key=lambda entry: entry.place,
        default=None,
    )
    return None if last is None or last.metric is None else last.metric.best


def by_metric(found: Sequence[CheckpointEntry]) -> list[CheckpointEntry]:
    """Checkpoints with a metric, the best first; of equal ones, the one saved first."""
    asked, ranked = direction(found), list[tuple[float, int, str, CheckpointEntry]]()
    for entry in found:
        if entry.metric is not None and entry.metric.counts and entry.metric.best == asked:
            ranked.append((entry.metric.rank, *entry.place, entry))
    return [entry for *_, entry in sorted(ranked, key=lambda each: each[:-1])]


def excess(found: Sequence[CheckpointEntry], latest: Path, keep: int) -> list[Path]:
    """List what has to go: all but `latest`, the `keep` newest with it, and the best.

    What can't be read counts as the oldest.
    """
    stay = {latest, *(entry.path for entry in by_metric(found)[:1])}
    others = sorted(
        (entry for entry in found if entry.path != latest and not entry.newer),
        key=lambda entry: entry.place,
        reverse=True,
    )
    return [entry.path for entry in others[keep - 1 :] if entry.path not in stay]


def prune(folder: Path, latest: Path, keep: int) -> None:
    """Remove what is too much beside `latest`; checkpoints of a newer paceline are left alone.

    Raises OSError.
    """
    for path in excess(entries(folder), latest, keep):
        away = Path(tempfile.mkdtemp(prefix=pending.SAVING, dir=folder))
        path.rename(away / "old")  # so that one half removed is never taken for one half written
        shutil.rmtree(away)


def free(folder: Path, step: int) -> Path:
    """Choose an unused name for the checkpoint of `step`.

    To replace an old one could lose it, if the process were killed in between.
    """
    name = f"step-{step:08d}"
    numbers = itertools.count(2)
    while os.path.lexists(folder / name):  # a link to nowhere is in the way, too
        name = f"step-{step:08d}.{next(numbers)}"
    return folder / name


def entries(folder: Path) -> list[CheckpointEntry]:
    """List the checkpoints in `folder` in no order.

    Raises `CheckpointError` where it can't be looked at.
    """
    try:
        return [
            _entry(path) for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir()
        ]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(
            f"the checkpoints in {folder} can't be looked at ({error.strerror})"
        ) from error


def _entry(path: Path) -> CheckpointEntry:
    try:
        found = manifest.read(path)
    except Newer as newer:
        return CheckpointEntry(path, newer.serial, newer=True)
    except Broken:
        return CheckpointEntry(path, None)
    serial = found.get("serial")
    return CheckpointEntry(path, serial if type(serial) is int else None, metric=Metric.of(found))
