"""The demo: which runs it makes, and what its table says about them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline.apps import demo
from paceline.errors import UsageError


class Launcher:
    """Leaves behind what a run of the script would."""

    def __init__(self, failing: int | None = None) -> None:
        self.calls: list[tuple[Path, dict[str, str], int, int]] = []
        self.failing = failing

    def __call__(self, script: Path, args: Sequence[str], workers: int, threads: int) -> int:
        options = dict(zip(args[::2], args[1::2], strict=True))
        self.calls.append((script, options, workers, threads))
        if len(self.calls) == self.failing:
            return 3
        folder = Path(options["--folder"]) / options["--name"]
        folder.mkdir(parents=True)
        lines = [{"step": step, "loss": 5.0 / step + workers * 1e-6} for step in range(1, int(options["--steps"]) + 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        parts = {"compute": 0.08, "exchange": 0.001 * workers, "wait": 0.0, "data": 0.0001}
        summary = {
            "samples_per_second": 300.0 * workers,
            "step_seconds": parts,
            "bytes_sent": {"within": 3_468_000 * (workers - 1), "between": 0},
        }
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "demo.json").write_text(json.dumps({"validation": [5.5, 2.25], "sample": "def [bold]tools(self):"}))
        return 0


def play(plan: demo.Plan, launcher: Launcher) -> tuple[int, str]:
    console = Console(record=True, width=140, file=open("/dev/null", "w"))  # noqa: SIM115
    code = demo.demo(plan, launcher, console)
    return code, console.export_text()


def test_runs_and_table(tmp_path: Path) -> None:
    launcher = Launcher()
    code, said = play(demo.Plan(steps=30, alone=20, folder=str(tmp_path)), launcher)
    assert code == 0
    assert [call[2] for call in launcher.calls] == [1, 1, 2]
    assert [call[1]["--steps"] for call in launcher.calls] == ["20", "20", "30"]
    assert {call[1]["--of"] for call in launcher.calls} == {"30"}
    assert launcher.calls[1][3] == 2 * launcher.calls[0][3] == 2 * launcher.calls[2][3]
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for cells in (line.split("│") for line in said.splitlines())
        if len(cells) > 4
    }
    assert rows["steps"] == ["20", "20", "30"]
    assert rows["speed-up"] == ["1.00x", "1.00x", "2.00x"]
    assert rows["largest difference, 20 steps"] == rows["largest difference, 20 steps"] == ["", "0.0e+00", "1.0e-06"]
    assert rows["validation loss, end"] == ["2.250"] * 3
    assert rows["step, exchange"] == ["1.0 ms", "1.0 ms", "2.0 ms"]
    assert rows["sent in a step, within hosts"] == ["0.00 MB", "0.00 MB", "3.47 MB"]
    assert "def [bold]tools(self):" in said and "paceline report" in said


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_run_that_fails_ends_the_demo_with_its_code(tmp_path: Path, failing: int) -> None:
    launcher = Launcher(failing)
    code, said = play(demo.Plan(steps=4, alone=2, folder=str(tmp_path)), launcher)
    assert code == 3 and len(launcher.calls) == failing and "speed-up" not in said


def test_other_text_reaches_the_script(tmp_path: Path) -> None:
    launcher = Launcher()
    play(demo.Plan(steps=4, alone=2, folder=str(tmp_path), text=Path("/words")), launcher)
    assert {call[1]["--text"] for call in launcher.calls} == {"/words"}


@pytest.mark.parametrize("wrong", [{"workers": 1}, {"steps": 10, "alone": 11}, {"alone": 1}])
def test_plans_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        demo.Plan(**wrong)
