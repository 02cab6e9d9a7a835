"""Checkpoints with a metric, small ones."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.checkpoint.files import checkpoint
from paceline.checkpoint.files.manifest import Best, Metric
from paceline.state.snapshot import make_snapshot


def save(
    folder: Path, step: int, value: float | None = None, best: Best = "min", keep: int = 3
) -> Path:
    """Write one that has its step as its state."""
    metric = None if value is None else Metric(value, best)
    return checkpoint.save_checkpoint(
        folder,
        make_snapshot({"model": {"step": torch.tensor(float(step))}}),
        step,
        keep=keep,
        metric=metric,
    )


def names(folder: Path) -> list[str]:
    """What lies in a folder, in order."""
    return sorted(path.name for path in folder.iterdir())
