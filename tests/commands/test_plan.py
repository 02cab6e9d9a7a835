"""`paceline plan` on real scripts: what it measures, prints and writes, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from paceline.errors import UsageError
from paceline.unequal.probe.script_profiler import (
    Condition,
    measure_script,
    measure_tensor_workers,
)
from tests.harness.jobs import wait_for

pytestmark = pytest.mark.jobs
HEAD = """
import sys, torch, paceline as pl
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(SAMPLES, 20), torch.randint(0, 2, (SAMPLES,))
loader = DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 2))
optimizer = torch.optim.AdamW(model.parameters())
"""
LOOP = """
with pl.start() as run:
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for _ in run.epochs(2):
        for a, b in loader:
            F.cross_entropy(model(a), b).backward()
            optimizer.step()
            optimizer.zero_grad()
    print("trained", run.size)
"""


def write_script(folder: Path, loop: str = LOOP, *, samples: int = 70, batch: int = 16) -> Path:
    path = folder / "train.py"
    head = HEAD.replace("SAMPLES", str(samples)).replace("BATCH", str(batch))
    path.write_text(head + loop)
    return path


def run_paceline(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline", *args],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_what_is_measured(tmp_path: Path) -> None:
    """A small data set, whose last batch is smaller, is enough."""
    script = write_script(tmp_path)
    profile = measure_script(str(script), [], [Condition(1, 1, (1, 4)), Condition(2, 1, (2,))])
    assert profile.global_batch == 16
    numels = [20 * 30, 30, 30 * 2, 2]
    assert sorted(each.numel for each in profile.gradients) == sorted(numels)
    # Backward makes the gradients of the last layer first.
    assert {each.numel for each in profile.gradients[:2]} == {60, 2}
    moments = [each.moment for each in profile.gradients]
    assert 0 <= moments[0] <= moments[-1] <= 1
    nbytes = 4 * sum(numels)
    # AdamW keeps two moments of each element, and a step count for each parameter.
    assert profile.state_bytes == (nbytes, nbytes, 2 * nbytes + 4 * len(numels))
    alone, both = profile.conditions
    assert [step.samples for step in alone.steps] == [4, 16]
    assert [step.samples for step in both.steps] == [8] and both.processes == 2
    assert all(min(s.forward, s.backward, s.optimizer) > 0 for s in (*alone.steps, *both.steps))
    small, large = (step.activation_bytes for step in alone.steps)
    # Autograd keeps the inputs of the layers and the result of the loss: in proportion to samples.
    assert 4 * 16 * (20 + 30) <= large <= 4 * 16 * (20 + 30 + 2 * 4) and 3 < large / small <= 4
    assert not list(tmp_path.glob("runs*"))


def test_a_plan_is_printed_written_run_and_compared(tmp_path: Path) -> None:
    write_script(tmp_path)
    planned = run_paceline(
        tmp_path, "plan", "train.py", "--workers", "2", "--out", "plan.toml", "--profile", "p.json",
        "--trace", "step.json", "--allow", "lossy",
    )  # fmt: skip
    assert planned.returncode == 0, planned.stderr
    assert "2 workers take" in planned.stdout and "LocalSGD(" in planned.stdout
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    # The profile answers again, for another cluster, without a measurement.
    again = run_paceline(
        tmp_path, "plan", "p.json", "--cluster", "ethernet-1g", "--what-if", "link=10gbit", "--json"
    )
    fields = json.loads(again.stdout)
    assert fields["all_workers"]["workers"] == [1, 1, 1, 1] and "measuring" not in again.stderr
    # Whatever is the fastest here: a plan of two workers is run, and the run is compared with it.
    plan = (tmp_path / "plan.toml").read_text()
    lines = ["workers = [2]" if line.startswith("workers") else line for line in plan.splitlines()]
    lines = ['sync = ""' if line.startswith("sync") else line for line in lines]
    (tmp_path / "plan.toml").write_text("\n".join(lines))
    ran = run_paceline(tmp_path, "run", "--plan", "plan.toml", "train.py")
    assert ran.returncode == 0, ran.stderr
    assert "trained 2" in ran.stdout and "planned " in ran.stderr
    (entry,) = map(json.loads, (tmp_path / "plan-ledger.jsonl").read_text().splitlines())
    assert entry["workers"] == 2 and entry["measured"] > 0
    (folder,) = (tmp_path / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["settings"]["plan"]["measured"] == entry["measured"]
    assert "Planned " in run_paceline(tmp_path, "report", str(folder)).stdout


CUT_LOOP = """
class Perceptron(torch.nn.Module):
    tensor_plan = pl.tensor({"up": pl.column(), "down": pl.row()})

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(20, 32), torch.nn.Linear(32, 20)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

model = torch.nn.Sequential(Perceptron(), Perceptron(), Perceptron(), torch.nn.Linear(20, 2))
optimizer = torch.optim.AdamW(model.parameters())
with pl.start() as run:
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for _ in run.epochs(2):
        for a, b in loader:
            run.step(model, a, b, loss=F.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
    print("trained", run.size, run.mesh)
"""


def test_what_is_measured_of_a_model_that_can_be_cut(tmp_path: Path) -> None:
    script = str(write_script(tmp_path, CUT_LOOP))
    profile = measure_script(script, [], [Condition(1, 1, (1,), (2, 4))])
    assert profile.takes_steps and profile.tensor_sizes == (2, 4, 8)
    (condition,) = profile.conditions
    assert [each.samples for each in condition.layers] == [4, 8]
    names = ["0", "1", "2", "3"]
    assert [cost.name for cost in condition.layers[0].costs] == names
    parameters = sum(cost.trained for cost in condition.layers[0].costs)
    assert parameters == profile.trained_bytes
    # The gradients and the random state of the script's own steps are untouched by that.
    assert profile.checkpointed.names == ("0", "1", "2")
    # Of three layers, autograd then keeps an input of 20 numbers, and no activations of 32.
    saved, kept = profile.checkpointed.saved_bytes, condition.steps[0].activation_bytes
    assert 3 * 4 * 16 * 32 <= saved < kept
    assert profile.possible_cuts.layers == 4
    (worker,) = measure_tensor_workers(script, [], [Condition(2, 1, (1,), (), 2)])
    # Half of the weights of six layers, and all else.
    halves = 3 * (2 * 20 * 32 + 32) // 2
    assert worker.size == 2 and worker.profile.trained_bytes == 4 * (halves + 3 * 20 + 42)
    step = worker.profile.conditions[0].steps[0]
    assert 0 < step.exchange < step.forward + step.backward
    # A sum forward for each pair of layers, and one backward for all but the first.
    assert step.exchanged_bytes >= 5 * 4 * 16 * 20 / 2


def test_a_plan_with_a_cut_is_run(tmp_path: Path) -> None:
    write_script(tmp_path, CUT_LOOP)
    planned = run_paceline(
        tmp_path, "plan", "train.py", "--workers", "2", "--out", "plan.toml", "--json"
    )
    assert planned.returncode == 0, planned.stderr
    ways = json.loads(planned.stdout)["candidates"]
    assert {"tensor=2", "stage=2"} <= {way["mesh"] for way in ways}
    way = next(way for way in ways if way["mesh"] == "stage=2")
    lines = (tmp_path / "plan.toml").read_text().splitlines()
    changed = {"workers": "[2]", "sync": '""', "shares": '""', "mesh": '"stage=2"'}
    changed["cut"] = json.dumps(way["cut"])
    for index, line in enumerate(lines):
        if (name := line.partition(" = ")[0]) in changed:
            lines[index] = f"{name} = {changed[name]}"
    (tmp_path / "plan.toml").write_text("\n".join(lines))
    ran = run_paceline(tmp_path, "run", "--plan", "plan.toml", "train.py")
    assert ran.returncode == 0, ran.stderr
    assert "trained 2 stage=2" in ran.stdout and "planned " in ran.stderr


REFUSED = {
    "no loop": (
        "with pl.start() as run:\n    run.prepare(model, optimizer, loader)\n",
        "ended before",
    ),
    "it fails": ("raise RuntimeError('it broke here')", "it broke here"),
    "no step": (
        LOOP.replace("F.cross_entropy(model(a), b).backward()", "pass"),
        "without a forward and a backward",
    ),
    "no rows": (
        LOOP.replace(
            "with pl.start", "loader.collate_fn = lambda rows: Rows(rows)\nwith pl.start"
        ).replace(
            "for a, b in loader:",
            "for rows in loader:\n"
            "            a, b = (torch.stack(each) for each in zip(*rows.rows))",
        ),
        "no tensor in it has a row for each sample",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_scripts_that_cant_be_measured(tmp_path: Path, name: str) -> None:
    loop, words = REFUSED[name]
    loop = "class Rows:\n    def __init__(self, rows):\n        self.rows = rows\n\n" + loop
    script = write_script(tmp_path, loop)
    with pytest.raises(UsageError, match=words):
        measure_script(str(script), [], [Condition(1, 1, (1, 2))])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_when_it_is_stopped(tmp_path: Path, number: signal.Signals) -> None:
    """It is stopped while copies of the script wait in their first step."""
    loop = LOOP.replace("F.cross", "open('began', 'w').close(); time.sleep(60); F.cross")
    write_script(tmp_path, "import time\n" + loop)
    (tmp_path / "temporary").mkdir()
    command = [sys.executable, "-m", "paceline", "plan", "train.py", "--workers", "2"]
    with subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    ) as planning:
        wait_for((tmp_path / "began").exists)
        copies = psutil.Process(planning.pid).children(recursive=True)
        planning.send_signal(number)
        assert planning.wait(60) == 128 + number
    assert copies and not psutil.wait_procs(copies, timeout=30)[1]
    assert not list((tmp_path / "temporary").glob("paceline-plan-*"))


def test_misuse_ends_with_one_line(tmp_path: Path) -> None:
    write_script(tmp_path)
    (tmp_path / "bad.json").write_text("{}")
    for args, words in (
        (("train.py",), "give either --workers N"),
        (("none.py", "--workers", "2"), "there is no script none.py"),
        (("model.pt", "--workers", "2"), "give a training script"),
        (("model.toml", "--workers", "2"), "is a transformer by numbers"),
        (("model.toml", "--cluster", "devices.toml"), "model.toml"),
        (("bad.json", "--workers", "2"), "isn't a profile"),
        (("train.py", "--workers", "2", "--sync", "Gossip()"), "can't be priced"),
        (("train.py", "--workers", "2", "--memory", "much"), "--memory much"),
    ):
        ended = run_paceline(tmp_path, "plan", *args)
        assert ended.returncode and words in ended.stderr and "Traceback" not in ended.stderr, args
    ended = run_paceline(tmp_path, "run", "--plan", "none.toml", "train.py")
    assert ended.returncode and "none.toml can't be read" in ended.stderr
