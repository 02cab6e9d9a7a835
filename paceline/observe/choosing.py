"""Chooses the run to report on: the newest run, or one by its name or folder."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import UsageError

RUNS_FOLDER = Path("runs")  # the default folder of runs


def choose_run(asked: Path | None, root: Path = RUNS_FOLDER) -> Path:
    """Return the folder of a run.

    Args:
        asked: Path or name of the run; None for the newest in `root`. A name alone is looked up in
            the current folder, and then in `root`. The folder need not exist.
        root: Folder of all runs. Default: "runs".

    Raises:
        UsageError: No run was named, and `root` has none.
    """
    if asked is not None:
        return (
            asked if asked.exists() or len(asked.parts) > 1 or not root.is_dir() else root / asked
        )
    runs = sorted(
        (written, path.parent)
        for name in ("metrics.jsonl", "live.json")
        for path in root.glob(f"*/{name}")
        if (written := _written_at(path))
    )
    if not runs:
        raise UsageError(
            f"there are no runs in {root.absolute()}: say which folder you mean, "
            "paceline report FOLDER"
        )
    return runs[-1][1]


def _written_at(path: Path) -> int:
    """Return when a file was written; 0 if it was removed, as when a run has just ended."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
