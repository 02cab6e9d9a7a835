"""The demo: which runs it makes, and what its table says about them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline.apps import demo, machine_load
from paceline.cluster.launcher.request import LaunchRequest
from paceline.errors import UsageError


class Launcher:
    """Leaves behind what a run of the script would, on this machine and in a lab."""

    def __init__(self, failing: int | None = None, missing: str = "", skew: float = 1e-6) -> None:
        self.requests: list[LaunchRequest] = []
        self.syncs: list[str] = []
        self.failing, self.missing, self.skew = failing, missing, skew

    def __call__(self, request: LaunchRequest) -> int:
        self.requests.append(request)
        if len(self.requests) == self.failing:
            return 3
        self.leave(request.args, request.workers, 300.0 if request.mesh is None else 200.0)
        return 0

    def lab(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        if words[0] == "check":
            said = (
                f"rights: MISSING: {self.missing}\nno lab can run here\n"
                if self.missing
                else "rights: root\n"
            )
            return subprocess.CompletedProcess(words, bool(self.missing), said)
        assert words[:2] == ["run", "--sync"] and "50mbit" in Path(words[3]).read_text()
        self.syncs.append(words[2])
        self.leave(words[5:], 2, 10.0 * len(self.syncs))
        return subprocess.CompletedProcess(words, 0)

    def leave(self, args: Sequence[str], workers: int, speed: float) -> None:
        options = dict(zip(args[:8:2], args[1:8:2], strict=True))
        folder = Path(options["--folder"]) / options["--name"]
        folder.mkdir(parents=True)
        steps = int(options["--steps"])
        lines = [
            {"step": step, "loss": 5.0 / step + workers * self.skew} for step in range(1, steps + 1)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        parts = {"compute": 0.08, "exchange": 0.001 * workers, "wait": 0.0, "data": 0.0001}
        summary = {
            "workers": workers,
            "samples": 32 * steps,
            "seconds": 32 * steps / speed,
            "samples_per_second": speed * workers,
            "step_seconds": parts,
            "bytes_sent": {"within": 3_468_000 * (workers - 1), "between": 8_000 / speed},
        }
        (folder / "summary.json").write_text(json.dumps(summary))
        if "--brief" not in args:
            (folder / "demo.json").write_text(
                json.dumps({"validation": [5.5, 2.25], "sample": "def [bold]tools(self):"})
            )


class Clocks:
    """Of a machine on which others keep so many cores busy, in one run after the other; ours
    keeps one.
    """

    def __init__(self, *others: float) -> None:
        self.rates = [rate for each in others for rate in (each, 0.0)]
        self.last = machine_load.ClockReading(0.0, 0.0, 0.0)

    def __call__(self) -> machine_load.ClockReading:
        now, self.last = (
            self.last,
            machine_load.ClockReading(
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
    code = demo.run_demo(
        plan, launcher, console, Clocks(*(others or (0.0, 0.0, 0.0))), launcher.lab
    )
    return code, console.export_text()


def option(request: LaunchRequest, name: str) -> str:
    """The value of an option among the arguments of the script."""
    return request.args[request.args.index(name) + 1]


def test_what_was_seen_is_said_in_three_sentences(tmp_path: Path) -> None:
    _, said = play(demo.DemoPlan(steps=30, alone=20, folder=str(tmp_path)), Launcher())
    same, survived, slow = (line for line in said.splitlines() if line.startswith("- "))
    assert "same losses" in same and "1.0e-06" in same
    assert "640 of 640 samples" in survived and "after 10 steps" in survived
    assert "took 64.0 s" in slow and "32.0 s, for 1/2 of the bytes" in slow


def test_other_losses_are_not_called_the_same(tmp_path: Path) -> None:
    _, said = play(demo.DemoPlan(steps=30, alone=20, folder=str(tmp_path)), Launcher(skew=0.1))
    assert (
        "same losses" not in said
        and "are NOT the same" in said
        and said.count("1.0e-01 apart") == 2
    )


def test_without_a_lab_the_slow_link_is_left_out_with_its_reason(tmp_path: Path) -> None:
    launcher = Launcher(missing="this user may not")
    code, said = play(demo.DemoPlan(steps=30, alone=20, folder=str(tmp_path)), launcher)
    assert code == 0 and launcher.syncs == [] and "left out" in said and "this user may not" in said


def test_runs_and_table(tmp_path: Path) -> None:
    launcher = Launcher()
    code, said = play(demo.DemoPlan(steps=30, alone=20, folder=str(tmp_path)), launcher)
    assert code == 0
    alone, whole, several, killed = launcher.requests
    assert [request.workers for request in launcher.requests] == [1, 1, 2, 2]
    assert [option(request, "--steps") for request in launcher.requests] == ["20", "20", "30", "20"]
    assert {option(request, "--of") for request in launcher.requests} == {"30"}
    assert (
        alone.threads is not None
        and whole.threads == 2 * alone.threads
        and several.threads == alone.threads
    )
    assert option(killed, "--kill") == "10" and killed.min_workers == 1
    assert launcher.syncs == [demo.EXACT_SYNC, demo.COMPRESSED_SYNC]
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for cells in (line.split("│") for line in said.splitlines())
        if len(cells) > 4
    }
    assert rows["steps"] == ["20", "20", "30"]
    assert rows["speed-up"] == ["1.00x", "1.00x", "2.00x"]
    assert rows["largest difference, 20 steps"] == ["", "0.0e+00", "1.0e-06"]
    assert rows["validation loss, end"] == ["", "", "2.250"]
    assert rows["step, exchange"] == ["1.0 ms", "1.0 ms", "2.0 ms"]
    assert rows["sent in a step, within hosts"] == ["0.00 MB", "0.00 MB", "3.47 MB"]
    assert "def [bold]tools(self):" in said and "paceline report" in said


def test_meshes_train_the_first_steps_too(tmp_path: Path) -> None:
    launcher = Launcher()
    plan = demo.DemoPlan(steps=30, alone=20, folder=str(tmp_path), meshes=("tensor=2", "shard=2"))
    code, said = play(plan, launcher, *[0.0] * 5)
    assert code == 0
    assert [request.mesh for request in launcher.requests] == [
        None,
        None,
        None,
        "tensor=2",
        "shard=2",
        None,
    ]
    assert [option(request, "--steps") for request in launcher.requests] == [
        "20",
        "20",
        "30",
        "20",
        "20",
        "20",
    ]
    assert len({option(request, "--name") for request in launcher.requests}) == 6
    assert (
        next(line for line in said.splitlines() if "largest difference, 20 steps" in line).count(
            "1.0e-06"
        )
        == 3
    )
    fastest = "The fastest run was '2 workers, 1 core each', with 600 samples/s. It was "
    assert (
        fastest
        + (
            "1.50 times as fast as '2 workers, tensor=2', 1.50 times as fast as '2 workers, "
            "shard=2', 2.00 times as fast as '1 worker, 1 core'"
        )
        in said
    )


def test_two_meshes_fit_a_terminal(tmp_path: Path) -> None:
    console = Console(record=True, width=80, file=open("/dev/null", "w"))  # noqa: SIM115
    plan = demo.DemoPlan(steps=30, alone=20, folder=str(tmp_path), meshes=("tensor=2", "shard=2"))
    launcher = Launcher()
    demo.run_demo(plan, launcher, console, Clocks(*[0.0] * 5), launcher.lab)
    said = console.export_text()
    table = said[said.index("┏") : said.index("┘")]
    assert "tensor=2" in table and "3.47 MB" in table and "…" not in table


@pytest.mark.parametrize("others", [(1.6, 0.0, 0.0), (0.0, 0.0, 1.6)])
def test_a_busy_machine_is_said_instead_of_a_speed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: tuple[float, ...]
) -> None:
    monkeypatch.setattr(demo, "count_cores", lambda: 2)
    monkeypatch.setattr(demo, "count_affinity_cores", lambda: 2)
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
    monkeypatch.setattr(demo, "count_cores", lambda: 2)
    monkeypatch.setattr(demo, "count_affinity_cores", lambda: 2)
    _, said = play(
        demo.DemoPlan(steps=4, alone=2, folder=str(tmp_path)), Launcher(), 0.1, 0.15, 0.1
    )
    assert "2.00x" in said and "busy" not in said


def test_with_a_quota_others_may_use_the_rest() -> None:
    assert not machine_load.is_crowded(6.0, needed=2, there=8) and machine_load.is_crowded(
        6.3, needed=2, there=8
    )


def test_the_cores_that_are_mine_are_counted() -> None:
    text = (
        "cpu  1 1 1 1 1 1 1 1\ncpu0 10 1 5 900 90 2 3 4 7 0\ncpu1 1000 0 0 0 0 0 0 0 0 0\ncpu10 7 "
        "0 0 5\nintr 5\n"
    )
    assert (
        machine_load.count_busy_ticks(text, {0}) == 10 + 1 + 5 + 2 + 3 + 4
        and machine_load.count_busy_ticks(text, {1, 10}) == 1007
    )
    assert machine_load.compute_other_load(None, machine_load.read_clocks()) == 0.0


def test_the_clocks_of_this_machine_go_on() -> None:
    first, second = machine_load.read_clocks(), machine_load.read_clocks()
    assert (
        first is not None
        and second is not None
        and all(later >= earlier for earlier, later in zip(first, second, strict=True))
    )
    assert second.busy > 0 and second.ours > 0


@pytest.mark.parametrize("failing", [1, 2, 3, 4])
def test_a_run_that_fails_ends_the_demo_with_its_code(tmp_path: Path, failing: int) -> None:
    launcher = Launcher(failing)
    code, said = play(demo.DemoPlan(steps=4, alone=2, folder=str(tmp_path)), launcher)
    assert code == 3 and len(launcher.requests) == failing and "speed-up" not in said


def test_other_text_reaches_the_script(tmp_path: Path) -> None:
    words, launcher = tmp_path / "words", Launcher()
    words.mkdir()
    (words / "a.py").write_text("pass\n")
    play(demo.DemoPlan(steps=4, alone=2, folder=str(tmp_path), text=words), launcher)
    assert {option(request, "--text") for request in launcher.requests} == {str(words)}


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
