"""Prints what each worker would hold of a model, as `record/layout.py` has written it."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from paceline.errors import UsageError
from paceline.formatting import format_bytes, format_count
from paceline.record.folder import LAYOUT_FILE, MEMORY_KINDS


def read_layout(folder: Path, script: str) -> dict[str, Any]:
    """Read the layout that a script has left in `folder`.

    Raises:
        UsageError: The script ended before it began to train.
    """
    try:
        layout: dict[str, Any] = json.loads((folder / LAYOUT_FILE).read_text())
    except FileNotFoundError:
        raise UsageError(
            f"{script} ended before it trained, so there is nothing to show: "
            "it has to give its model to run.prepare, and to begin a loop "
            "over the prepared loader"
        ) from None
    return layout


def print_layout(layout: dict[str, Any], console: Console) -> None:
    """Print the layout of a model: parameters, totals and traffic.

    Parameters are shown with their placement on the first worker, totals for all workers.
    """
    mesh = f", mesh {layout['mesh']}" if layout["mesh"] else ""
    table = Table(title=f"{format_count(len(layout['workers']), 'worker')}{mesh}", box=SIMPLE)
    for name in ("parameter", "shape", "dtype", "cut along", "on the first worker", *MEMORY_KINDS):
        table.add_column(name, justify="right" if name in MEMORY_KINDS else "left", no_wrap=True)
    for row in layout["rows"]:
        cells = [
            "?" if row[kind] is None else format_bytes(row[kind]) if row[kind] else "-"
            for kind in MEMORY_KINDS
        ]
        table.add_row(
            row["name"],
            _format_shape(row["shape"]),
            row["dtype"],
            ", ".join(row["axes"]) or "-",
            _format_local_share(row),
            *cells,
        )
    console.print(table)
    console.print(_make_totals_table(layout["workers"]))
    if any(row["optimizer"] is None for row in layout["rows"]):
        console.print("?: what the optimizer keeps shows itself in a step alone; it is not counted")
    for cut in layout["cuts"]:
        console.print(f"{cut['cut']}: {cut['travels']}", markup=False, highlight=False)


def _make_totals_table(workers: list[dict[str, int]]) -> Table:
    """Return a table of the bytes that workers hold. Workers with the same bytes share a line."""
    table = Table(title="held by each worker from step to step", box=SIMPLE)
    for name in ("workers", *MEMORY_KINDS, "in all"):
        table.add_column(name, justify="left" if name == "workers" else "right")
    ranks_by_sizes: dict[tuple[int, ...], list[int]] = {}
    for rank, held in enumerate(workers):
        ranks_by_sizes.setdefault(tuple(held[kind] for kind in MEMORY_KINDS), []).append(rank)
    for sizes, ranks in ranks_by_sizes.items():
        table.add_row(
            ", ".join(map(str, ranks)), *(format_bytes(size) for size in (*sizes, sum(sizes)))
        )
    return table


def _format_shape(shape: list[int]) -> str:
    """Format a shape."""
    return " x ".join(map(str, shape)) or "one number"


def _format_local_share(row: dict[str, Any]) -> str:
    """Format the part of a parameter that the first worker holds."""
    if row["flat"]:
        return f"{prod(row['here']):,} of {prod(row['shape']):,}"
    return "whole" if row["here"] == row["shape"] else _format_shape(row["here"])
