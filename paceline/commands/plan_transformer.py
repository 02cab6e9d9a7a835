"""`paceline plan` for a transformer that is given by its numbers, on a cluster of devices."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import typer

from paceline.errors import UsageError
from paceline.formatting import format_bytes
from paceline.planner.transformers.device import DeviceCluster, read_device_cluster
from paceline.planner.transformers.layouts import ScoredLayout, plan_transformer
from paceline.planner.transformers.transformer import read_transformer

COLUMNS: Final = (
    "layout",
    "s/step",
    "samples/s",
    "memory",
    "within",
    "between",
    "waits for",
)
SHOWN: Final = 8


def answer_transformer(
    model_file: Path, cluster_file: str | None, memory_bytes: float | None, *, as_json: bool
) -> None:
    """Print the best layouts, and the best of each kind.

    Args:
        model_file: File of the transformer.
        cluster_file: File of the cluster of devices.
        memory_bytes: Most bytes of a device. Default (None): those that the cluster says.
        as_json: Print JSON.

    Raises:
        UsageError: A file is wrong, or no layout is possible.
    """
    if cluster_file is None or not cluster_file.endswith(".toml"):
        raise UsageError(
            f"{model_file} is a transformer by numbers: give --cluster FILE.toml, with a table "
            "[cluster] that names the device"
        )
    model, cluster = read_transformer(model_file), read_device_cluster(cluster_file)
    if memory_bytes is not None:
        device = replace(cluster.device, memory_bytes=memory_bytes)
        cluster = replace(cluster, device=device)
    scored = plan_transformer(model, cluster)
    if as_json:
        typer.echo(json.dumps([_make_fields(each) for each in scored[:100]], indent=2))
    else:
        _print_layouts(scored, cluster, model.name)


def _choose_shown(scored: Sequence[ScoredLayout]) -> list[ScoredLayout]:
    """Choose the best layout for each way to divide the devices, the fastest ways first."""
    best: dict[tuple[int, int, int], ScoredLayout] = {}
    for each in scored:
        layout = each.layout
        best.setdefault((layout.tensor, layout.pipeline, layout.data), each)
    return list(best.values())[:SHOWN]


def _print_layouts(scored: Sequence[ScoredLayout], cluster: DeviceCluster, name: str) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 180, highlight=False, markup=False)
    best = scored[0]
    where = f"{name} on {cluster.devices} devices"
    console.print(
        f"{where}: {best.layout.describe()} takes {best.seconds:.3g} s a step."
        if best.fits
        else f"{where}: nothing fits. The smallest layout needs "
        f"{format_bytes(round(best.memory.total))} on a device: {best.layout.describe()}. "
        f"A device has {format_bytes(round(cluster.device.memory_bytes))}."
    )
    table = Table(box=SIMPLE)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("layout", "waits for") else "right")
    for each in _choose_shown(scored):
        waits, share = max(each.shares.items(), key=lambda pair: pair[1])
        table.add_row(
            each.layout.describe(),
            f"{each.seconds:.3g}",
            f"{each.samples_per_second:.4g}",
            format_bytes(round(each.memory.total)) + ("" if each.fits else " (too much)"),
            format_bytes(round(each.cost.sent_within)),
            format_bytes(round(each.cost.sent_between)),
            f"{waits} {share:.0%}",
        )
    console.print(table)


def _make_fields(scored: ScoredLayout) -> dict[str, Any]:
    """Make plain data with stable keys of a layout."""
    return {
        **vars(scored.layout),
        "seconds_per_step": scored.seconds,
        "samples_per_second": scored.samples_per_second,
        "memory_bytes": scored.memory.total,
        "fits": scored.fits,
        "sent_within": scored.cost.sent_within,
        "sent_between": scored.cost.sent_between,
        "parts": dict(scored.shares),
    }
