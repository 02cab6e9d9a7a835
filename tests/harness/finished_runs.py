"""The folder of a run that has ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.record.folder import RunFolder, RunSummary, RunTotals

QUIET = {"compute": 0.095, "exchange": 0.003, "wait": 0.001, "data": 0.001}


def finished(
    tmp_path: Path,
    parts: dict[str, float] | None = None,
    steps: list[dict[str, float]] | None = None,
    **changes: Any,
) -> Path:
    """A run that has ended, whose steps were split into `parts`: a hundred alike, or `steps`."""
    steps = steps or [parts or QUIET] * 100
    count = len(steps)
    parts = {part: sum(step[part] for step in steps) / count for part in QUIET}
    folder = RunFolder.create_folder(tmp_path, "run", say=lambda text: None)
    whole = count * sum(parts.values())
    fields: dict[str, Any] = {
        "sync": "AllReduce()",
        "workers": 2,
        "hosts": 1,
        "bytes_sent": {"within": 7.5e6, "between": 0.0},
        "codecs": [],
        "events": [],
        "checkpoints": {"count": 0, "stall_seconds": 0.0, "write_seconds": 0.0, "nbytes": 0},
    }
    work, late = changes.pop("work", []), changes.pop("late", [])
    rate, loss = 64 * count / whole, changes.pop("loss", 1.2345)
    totals = RunTotals(
        count,
        64 * count,
        changes.pop("seconds", whole * 1.01),
        rate,
        loss,
        parts,
        [parts, parts],
        work,
        late,
    )
    RunSummary(totals=totals, parameters_sha256="00", **(fields | changes)).write(folder)
    lines = (
        {"step": index, "time": 0.1 * index, "samples": 64, "seconds": step}
        for index, step in enumerate(steps, 1)
    )
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder.path
