"""A script without a DataLoader gives the same losses with any number of workers."""

from __future__ import annotations

import json

import pytest

from tests.harness.jobs import ROOT, Jobs

EXAMPLE = ROOT / "examples" / "bridges/random_windows.py"


@pytest.mark.slow
def test_random_windows(job: Jobs) -> None:
    found = {}
    for size in (1, 2, 3):
        ended = job.program(EXAMPLE, size, "--name", f"by-{size}").end()
        assert ended.code == 0, ended
        folder = job.folder / "runs" / f"by-{size}"
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        losses = [line["loss"] for line in lines if "loss" in line]
        validation = json.loads((folder / "summary.json").read_text())["results"]["validation"]
        found[size] = [*losses, validation]
    assert len(found[1]) == 201 and found[1][-1] < 2.8 < found[1][0]
    assert found[2] == pytest.approx(found[1], rel=1e-4)
    assert found[3] == pytest.approx(found[1], rel=1e-4)
