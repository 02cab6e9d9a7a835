"""Draws what was learned: `draw.py LEARNING.json FOLDER`. Needs only matplotlib.

learning-BATCH.png   training loss against steps, and against bytes
learning-race.png    validation loss against seconds
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

SMOOTH = 50  # steps of which the mean is drawn
TOP = 3.3  # nats: where the picture of the table ends


def finish(axes: Axes, x: str, y: str) -> None:
    """Names of the axes, and less ink."""
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(fontsize=6, frameon=False)


def sent(row: dict[str, Any], exact: float, steps: int) -> float:
    """MB after so many steps; while it warms up, a way sends what exact does."""
    whole, warm = len(row["curve"]), row["warm"]
    if steps <= warm:
        return exact * steps / 1e6
    return (
        exact * warm + (row["sent"] * whole - exact * warm) / (whole - warm) * (steps - warm)
    ) / 1e6


def table(rows: list[dict[str, Any]], path: Path) -> None:
    """Training losses of the first seed."""
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11, 4), layout="constrained", sharey=True
    )
    for number, row in enumerate(rows):
        curve = row["curve"]
        look: dict[str, Any] = {
            "color": f"C{number % 10}",
            "linestyle": "-" if number < 10 else ":",
        }
        points = range(SMOOTH, len(curve) + 1, 5)
        means = [sum(curve[end - SMOOTH : end]) / SMOOTH for end in points]
        left.plot(points, means, label=row["title"], linewidth=1, **look)
        right.semilogx(
            [sent(row, rows[0]["sent"], end) for end in points],
            means,
            label=row["title"],
            linewidth=1,
            **look,
        )
    left.set_ylim(top=TOP)
    finish(left, "steps", "training loss, nats")
    finish(right, "MB sent by all workers", "")
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def race(rows: list[dict[str, Any]], path: Path) -> None:
    """Validation losses in time."""
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for row in rows:
        points = [point for point in row["curve"] if point[1] > 0]
        style = "-" if row["sync"] else "--"
        axes.semilogx(
            [seconds for _, seconds, _ in points],
            [loss for *_, loss in points],
            style,
            label=row["title"],
            linewidth=1.2,
        )
    axes.axhline(rows[0]["goal"], color="gray", linewidth=0.6)
    finish(axes, "seconds", "validation loss, nats")
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    found, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    for batch, rows in found["tables"].items():
        table(rows, folder / f"learning-{batch}.png")
    if found["race"]:
        race(found["race"], folder / "learning-race.png")


if __name__ == "__main__":
    main()
