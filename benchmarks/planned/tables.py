"""Finds the tables of a folder, and what checks each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.planned.memory_checks import check_figure, check_states, check_torchgpipe
from benchmarks.planned.readers import read_layouts, read_vtrain
from benchmarks.planned.rows import MeasuredLayout
from benchmarks.planned.scores import Verdict
from benchmarks.planned.time_checks import check_bubbles, check_layer, check_layouts

# The beginning of a table's name, and its check. Tables with another name are of layouts.
CHECKS: Mapping[str, Callable[[Path], Iterator[Verdict]]] = {
    "korthikanti2022_table4": check_layer,
    "zerobubble": check_bubbles,
    "zero_table1": check_states,
    "korthikanti2022_fig1": check_figure,
    "torchgpipe_memory": check_torchgpipe,
}
# What devices achieve, and a pipeline of images: no layouts of transformers.
NOT_CHECKED = ("calib_", "vtrain_calib_", "torchgpipe_pipeline")


def check_folder(folder: Path) -> Iterator[Verdict]:
    """Check all tables of a folder."""
    for path, rows in read_folder(folder):
        yield from check_layouts(path.stem, rows)
    for name, check in CHECKS.items():
        for path in sorted(folder.glob(f"{name}*.csv")):
            yield from check(path)


def read_folder(folder: Path) -> Iterator[tuple[Path, list[MeasuredLayout]]]:
    """Read all tables of a folder that have layouts and seconds."""
    for path in sorted(folder.glob("*.csv")):
        if path.name.startswith((*CHECKS, *NOT_CHECKED)):
            continue
        if path.name.startswith("vtrain"):
            yield path, read_vtrain(path)
            continue
        rows, left_out = read_layouts(path)
        if left_out:
            print(f"{len(left_out)} rows left out: {left_out[0]}")
        if rows:
            yield path, rows
