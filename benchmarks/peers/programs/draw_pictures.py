"""Draws a summary's step times, a picture for each setting: `draw_pictures.py SUMMARY.json FOLDER`.

Needs only matplotlib.

model           peer 1  ======|            bars: medians; thin lines: quartiles; ours is dark, the
                                           rest light
                peer 2  =========|-        those without a time are named below
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

OURS, THEIRS, SINGLE = "#1f4e79", "#9db8d2", "#d9d9d9"


def draw(axes: Axes, cell: dict[str, Any]) -> None:
    """The bars of one cell, the fastest on top."""
    rows = sorted(
        (row for row in cell["rows"] if row["median"] is not None),
        key=lambda row: -float(row["median"]),
    )
    unit, factor = ("s", 1.0) if rows and rows[0]["median"] >= 1 else ("ms", 1e3)
    for height, row in enumerate(rows):
        color = {"paceline": OURS, "none": SINGLE}.get(row["peer"], THEIRS)
        axes.barh(height, row["median"] * factor, color=color)
        axes.plot(
            [row["low"] * factor, row["high"] * factor],
            [height, height],
            color="black",
            linewidth=1,
        )
        axes.text(
            row["high"] * factor, height, f" {row['median'] * factor:.3g}", va="center", fontsize=7
        )
    axes.set_yticks(range(len(rows)), [row["title"] for row in rows], fontsize=7)
    axes.set_title(f"{cell['model']}, {unit} per step", fontsize=9)
    axes.tick_params(axis="x", labelsize=7)
    axes.margins(x=0.15)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main() -> None:
    summary, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    for setting in dict.fromkeys(cell["setting"] for cell in summary["cells"]):
        cells = [cell for cell in summary["cells"] if cell["setting"] == setting]
        rows = -(-len(cells) // 2)
        figure, axes = pyplot.subplots(
            rows, min(2, len(cells)), figsize=(11, 3.2 * rows), squeeze=False, layout="constrained"
        )
        for place, cell in zip(axes.flat, cells, strict=False):
            draw(place, cell)
        for place in list(axes.flat)[len(cells) :]:
            place.set_visible(False)
        figure.savefig(folder / f"{setting}.png", dpi=110, metadata={"Software": None})
        pyplot.close(figure)


if __name__ == "__main__":
    main()
