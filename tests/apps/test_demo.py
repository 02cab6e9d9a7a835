"""The demo: which runs it makes, and what its table says about them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline.apps import demo, load
from paceline.errors import UsageError


class Launcher:
    """Leaves behind what a run of the script would."""

    def __init__(self, failing: int | None = None) -> None:
        self.calls: list[tuple[Path, dict[str, str], int, int]] = []
        self.meshes: list[str | None] = []
        self.failing = failing

    def __call__(
        self, script: Path, args: Sequence[str], workers: int, threads: int, mesh: str | None
    ) -> int:
        self.meshes.append(mesh)
        options = dict(zip(args[::2], args[1::2], strict=True))
        self.calls.append((script, options, workers, threads))
        if len(self.calls) == self.failing:
            return 3
        folder = Path(options["--folder"]) / options["--name"]
        folder.mkdir(parents=True)
        lines = [
            {"step": step, "loss": 5.0 / step + workers * 1e-6}
            for step in range(1, int(options["--steps"]) + 1)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        parts = {"compute": 0.08, "exchange": 0.001 * workers, "wait": 0.0, "data": 0.0001}
        summary = {
            "samples_per_second": (300.0 if mesh is None else 200.0) * workers,
            "step_seconds": parts,
            "bytes_sent": {"within": 3_468_000 * (workers - 1), "between": 0},
        }
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "demo.json").write_text(
            json.dumps({"validation": [5.5, 2.25], "sample": "def [bold]tools(self):"})
        )
        return 0


class Clocks:
    """Of a machine on which others keep so many cores busy, in one run after the other; ours
    keeps one.
    """

    def __init__(self, *others: float) -> None:
        self.rates = [rate for each in others for rate in (each, 0.0)]
        self.last = load.ClockReading(0.0, 0.0, 0.0)

    def __call__(self) -> load.ClockReading:
        now, self.last = (
            self.last,
            load.ClockReading(
                *(
                    a + b
                    for a, b in zip(
                        self.last, (10.0, 10 * (1 + self.rates.pop(0)), 10.0), strict=True
                    )
                )
            ),
        )
        return now


def play(plan: demo.DemoPlan, launcher: Launcher, *others: float) -> tuple[int, str]:
    console = Console(record=True, width=140, file=open("/dev/null", "w"))  # noqa: SIM115
    code = demo.demo(plan, launcher, console, Clocks(*(others or (0.0, 0.0, 0.0))))
    return code, console.export_text()


def test_runs_and_table(tmp_path: Path) -> None:
    launcher = Launcher()
    code, said = play(demo.DemoPlan(steps=30, alone=20, folder=str(tmp_path)), launcher)
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
    assert (
        rows["largest difference, 20 steps"]
        == rows["largest difference, 20 steps"]
        == ["", "0.0e+00", "1.0e-06"]
    )
    assert rows["validation loss, end"] == ["2.250"] * 3
    assert rows["step, exchange"] == ["1.0 ms", "1.0 ms", "2.0 ms"]
    assert rows["sent in a step, within hosts"] == ["0.00 MB", "0.00 MB", "3.47 MB"]
    assert "def [bold]tools(self):" in said and "paceline report" in said


def test_meshes_train_the_first_steps_too(tmp_path: Path) -> None:
    launcher = Launcher()
    plan = demo.DemoPlan(steps=30, alone=20, folder=str(tmp_path), meshes=("tensor=2", "shard=2"))
    code, said = play(plan, launcher, *[0.0] * 5)
    assert code == 0 and launcher.meshes == [None, None, None, "tensor=2", "shard=2"]
    assert [call[1]["--steps"] for call in launcher.calls] == ["20", "20", "30", "20", "20"]
    assert [call[2] for call in launcher.calls] == [1, 1, 2, 2, 2] and len(
        {call[1]["--name"] for call in launcher.calls}
    ) == 5
    assert (
        next(line for line in said.splitlines() if "largest difference, 20 steps" in line).count(
            "1.0e-06"
        )
        == 3
    )
    fastest = "The fastest here was '2 workers, 1 core each', with 600 samples/s: "
    assert (
        fastest
        + (
            "1.50 times '2 workers, tensor=2', 1.50 times '2 workers, shard=2', 2.00 times '1 "
            "worker, 1 core'"
        )
        in said
    )


def test_two_meshes_fit_a_terminal(tmp_path: Path) -> None:
    console = Console(record=True, width=80, file=open("/dev/null", "w"))  # noqa: SIM115
    plan = demo.DemoPlan(steps=30, alone=20, folder=str(tmp_path), meshes=("tensor=2", "shard=2"))
    demo.demo(plan, Launcher(), console, Clocks(*[0.0] * 5))
    said = console.export_text()
    table = said[said.index("┏") : said.index("┘")]
    assert "tensor=2" in table and "3.47 MB" in table and "…" not in table


@pytest.mark.parametrize("others", [(1.6, 0.0, 0.0), (0.0, 0.0, 1.6)])
def test_a_busy_machine_is_said_instead_of_a_speed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: tuple[float, ...]
) -> None:
    monkeypatch.setattr(demo, "cores", lambda: 2)
    monkeypatch.setattr(demo, "allowed", lambda: 2)
    code, said = play(demo.DemoPlan(steps=4, alone=2, folder=str(tmp_path)), Launcher(), *others)
    beside = ("1 worker, 1 core", "2 workers, 1 core each")[others[2] > 0]
    assert code == 0
    assert (
        f"The machine is busy (beside '{beside}' other programs used 1.6 of 2 cores): "
        "the speed-up isn't meaningful" in said
    )
    assert "2.00x" not in said and "busy" in next(
        line for line in said.splitlines() if "speed-up  " in line
    )


def test_a_little_of_others_is_not_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "cores", lambda: 2)
    monkeypatch.setattr(demo, "allowed", lambda: 2)
    _, said = play(
        demo.DemoPlan(steps=4, alone=2, folder=str(tmp_path)), Launcher(), 0.1, 0.15, 0.1
    )
    assert "2.00x" in said and "busy" not in said


def test_with_a_quota_others_may_use_the_rest() -> None:
    assert not load.crowded(6.0, needed=2, there=8) and load.crowded(6.3, needed=2, there=8)


def test_the_cores_that_are_mine_are_counted() -> None:
    text = (
        "cpu  1 1 1 1 1 1 1 1\ncpu0 10 1 5 900 90 2 3 4 7 0\ncpu1 1000 0 0 0 0 0 0 0 0 0\ncpu10 7 "
        "0 0 5\nintr 5\n"
    )
    assert load.busy(text, {0}) == 10 + 1 + 5 + 2 + 3 + 4 and load.busy(text, {1, 10}) == 1007
    assert load.others(None, load.read()) == 0.0


def test_the_clocks_of_this_machine_go_on() -> None:
    first, second = load.read(), load.read()
    assert (
        first is not None
        and second is not None
        and all(later >= earlier for earlier, later in zip(first, second, strict=True))
    )
    assert second.busy > 0 and second.ours > 0


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_run_that_fails_ends_the_demo_with_its_code(tmp_path: Path, failing: int) -> None:
    launcher = Launcher(failing)
    code, said = play(demo.DemoPlan(steps=4, alone=2, folder=str(tmp_path)), launcher)
    assert code == 3 and len(launcher.calls) == failing and "speed-up" not in said


def test_other_text_reaches_the_script(tmp_path: Path) -> None:
    words, launcher = tmp_path / "words", Launcher()
    words.mkdir()
    (words / "a.py").write_text("pass\n")
    play(demo.DemoPlan(steps=4, alone=2, folder=str(tmp_path), text=words), launcher)
    assert {call[1]["--text"] for call in launcher.calls} == {str(words)}


@pytest.mark.parametrize(
    "wrong",
    [
        {"workers": 1},
        {"steps": 10, "alone": 11},
        {"alone": 1},
        {"text": Path("/nowhere")},
        {"meshes": ("tensor=3",)},
    ],
)
def test_plans_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        demo.DemoPlan(**wrong)
