"""The tables of `paceline layout`: parameters in words, and workers that hold the same in one
line.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline.errors import UsageError
from paceline.observe.layout_report import print_layout, read_layout
from paceline.record.folder import LAYOUT_FILE


def parameter(
    name: str,
    shape: list[int],
    here: list[int],
    axes: list[str],
    optimizer: int | None = 0,
    *,
    flat: bool = False,
) -> dict[str, Any]:
    sizes = {"parameters": 2_000_000, "gradients": 0, "optimizer": optimizer}
    return {
        "name": name,
        "shape": shape,
        "dtype": "float32",
        "here": here,
        "flat": flat,
        "axes": axes,
        **sizes,
    }


def drawn(
    rows: list[dict[str, Any]], workers: list[dict[str, int]], **rest: Any
) -> list[list[str]]:
    """The words of each line that has some."""
    out = io.StringIO()
    print_layout(
        {"mesh": "", "cuts": [], "rows": rows, "workers": workers, **rest},
        Console(width=160, file=out),
    )
    return [line.split() for line in out.getvalue().splitlines() if line.strip()]


def test_each_parameter_has_a_line() -> None:
    rows = [
        parameter("embedding", [10, 4], [10, 4], []),
        parameter("up", [8, 4], [4, 4], ["tensor"], 96),
        parameter("down", [4, 8], [5], ["tensor", "shard"], flat=True),
        parameter("scale", [], [], []),
    ]
    lines = drawn(
        rows,
        [{"parameters": 8_000_000, "gradients": 12, "optimizer": 96}],
        mesh="shard=2, tensor=2",
    )
    assert ["1", "worker,", "mesh", "shard=2,", "tensor=2"] in lines
    assert ["embedding", "10", "x", "4", "float32", "-", "whole", "2.0", "MB", "-", "-"] in lines
    assert [
        "up",
        "8",
        "x",
        "4",
        "float32",
        "tensor",
        "4",
        "x",
        "4",
        "2.0",
        "MB",
        "-",
        "96",
        "bytes",
    ] in lines
    assert [
        "down",
        "4",
        "x",
        "8",
        "float32",
        "tensor,",
        "shard",
        "5",
        "of",
        "32",
        "2.0",
        "MB",
        "-",
        "-",
    ] in lines
    assert ["scale", "one", "number", "float32", "-", "whole", "2.0", "MB", "-", "-"] in lines
    assert ["0", "8.0", "MB", "12", "bytes", "96", "bytes", "8.0", "MB"] in lines
    assert not any("counted" in line for line in lines)


def test_workers_that_hold_the_same_share_a_line() -> None:
    one, other = (
        {"parameters": 10, "gradients": 20, "optimizer": 0},
        {"parameters": 10, "gradients": 30, "optimizer": 0},
    )
    lines = drawn(
        [parameter("w", [1], [1], [], None)],
        [one, other, one],
        cuts=[{"cut": "shard()", "travels": "parts [of all]"}],
    )
    assert ["0,", "2", "10", "bytes", "20", "bytes", "0", "bytes", "30", "bytes"] in lines
    assert ["1", "10", "bytes", "30", "bytes", "0", "bytes", "40", "bytes"] in lines
    assert ["shard():", "parts", "[of", "all]"] in lines
    assert ["w", "1", "float32", "-", "whole", "2.0", "MB", "-", "?"] in lines and any(
        "counted" in line for line in lines
    )


def test_a_script_that_did_not_come_to_train_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"train\.py ended before it trained"):
        read_layout(tmp_path, "train.py")
    (tmp_path / LAYOUT_FILE).write_text(json.dumps({"mesh": "data=2"}))
    assert read_layout(tmp_path, "train.py") == {"mesh": "data=2"}
