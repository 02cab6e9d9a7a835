"""Chooses the run to report on: the newest, or one by its name or by its folder."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import UsageError

RUNS = Path("runs")  # the default folder of runs


def choose(asked: Path | None, root: Path = RUNS) -> Path:
    """Find the folder of the run that is asked for (None: the newest in `root`); a name alone is
    looked for here, then in `root`.

    Raises UsageError where there is none to take; a folder that is asked for need not be there.
    """
    if asked is not None:
        return (
            asked if asked.exists() or len(asked.parts) > 1 or not root.is_dir() else root / asked
        )
    runs = sorted(
        (written, path.parent)
        for name in ("metrics.jsonl", "live.json")
        for path in root.glob(f"*/{name}")
        if (written := _written(path))
    )
    if not runs:
        raise UsageError(
            f"there are no runs in {root.absolute()}: say which folder you mean, paceline report "
            "FOLDER"
        )
    return runs[-1][1]


def _written(path: Path) -> int:
    """Return when a file was written; 0 where it is gone by now, as that of a run that has just
    ended.
    """
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
