"""Describes what each worker would hold of a model, from what `record/layout.py` has written."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from paceline.errors import UsageError
from paceline.formatting import counted, sized
from paceline.record.folder import KINDS, LAYOUT


def read(folder: Path, script: str) -> dict[str, Any]:
    """Read what a script has left in `folder`.

    Raises `UsageError` where it ended before it came to train.
    """
    try:
        found: dict[str, Any] = json.loads((folder / LAYOUT).read_text())
    except FileNotFoundError:
        raise UsageError(
            f"{script} ended before it trained, so there is nothing to show: "
            "it has to give its model to run.prepare, and to begin a loop "
            "over the prepared loader"
        ) from None
    return found


def describe(found: dict[str, Any], console: Console) -> None:
    """Print the placement of each parameter on the first worker, what each worker holds in all,
    and what travels when.
    """
    mesh = f", mesh {found['mesh']}" if found["mesh"] else ""
    table = Table(title=f"{counted(len(found['workers']), 'worker')}{mesh}", box=SIMPLE)
    for name in ("parameter", "shape", "dtype", "cut along", "on the first worker", *KINDS):
        table.add_column(name, justify="right" if name in KINDS else "left", no_wrap=True)
    for row in found["rows"]:
        cells = [
            "?" if row[kind] is None else sized(row[kind]) if row[kind] else "-" for kind in KINDS
        ]
        table.add_row(
            row["name"],
            _shape(row["shape"]),
            row["dtype"],
            ", ".join(row["axes"]) or "-",
            _here(row),
            *cells,
        )
    console.print(table)
    console.print(_totals(found["workers"]))
    if any(row["optimizer"] is None for row in found["rows"]):
        console.print("?: what the optimizer keeps shows itself in a step alone; it is not counted")
    for each in found["cuts"]:
        console.print(f"{each['cut']}: {each['travels']}", markup=False, highlight=False)


def _totals(workers: list[dict[str, int]]) -> Table:
    """Return a table of what workers hold, those that hold the same in one line."""
    table = Table(title="held by each worker from step to step", box=SIMPLE)
    for name in ("workers", *KINDS, "in all"):
        table.add_column(name, justify="left" if name == "workers" else "right")
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank, held in enumerate(workers):
        alike.setdefault(tuple(held[kind] for kind in KINDS), []).append(rank)
    for sizes, ranks in alike.items():
        table.add_row(", ".join(map(str, ranks)), *(sized(size) for size in (*sizes, sum(sizes))))
    return table


def _shape(shape: list[int]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def _here(row: dict[str, Any]) -> str:
    if row["flat"]:
        return f"{prod(row['here']):,} of {prod(row['shape']):,}"
    return "whole" if row["here"] == row["shape"] else _shape(row["here"])
