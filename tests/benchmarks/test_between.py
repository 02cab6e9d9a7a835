"""The benchmark between hosts runs, compares what it says it compares, and is held to its bars
where they hold.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.lab import kernel
from tests.harness import nursery

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "between.py"


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.skipif(bool(kernel.find_missing()), reason=kernel.find_missing())
def test_the_table(tmp_path: Path) -> None:
    out = tmp_path / "between.json"
    words = [
        "--sizes",
        "0.4M",
        "--rounds",
        "1",
        "--placements",
        "round-robin",
        "--bandwidth",
        "100mbit",
        "--out",
        str(out),
    ]
    answer = nursery.run_script(SCRIPT, tmp_path, *words)
    assert answer.returncode == 0, answer.stderr
    found = json.loads(out.read_text())
    assert set(found["raw"]) == {"round-robin, 0.4M"}
    assert [row["compared"] for row in found["rows"]] == [
        "gloo / paceline",
        "of the link's rate",
    ] * 3
    assert all(row["least"] is None for row in found["rows"])  # bars are for 100 MB at 1 Gbit/s
    used = [
        row["value"]["value"] for row in found["rows"] if row["compared"] == "of the link's rate"
    ]
    assert all(0 < share < 1 for share in used)
