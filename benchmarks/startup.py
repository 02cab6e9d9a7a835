"""Measures starting: imports, `paceline --help`, and a short training to its end.

    alone     the plain loop                one worker of paceline
    together  torchrun, two workers, DDP    paceline run, two workers

Run it with `python benchmarks/startup.py`. `paceline --help` must not import torch.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from harness import ONE_THREAD, Row, arguments, bootstrap, interleave, ratio, report

SHOW = (
    "import sys; from paceline.cli import main; sys.argv = ['paceline', '--help']\ntry: "
    "main()\nexcept SystemExit: pass\n"
)
HELP_SECONDS = 0.4  # longest time of `paceline --help`
BESIDE = Path(sys.executable).parent
COMMANDS = {
    "import torch": [sys.executable, "-c", "import torch"],
    # The attribute is imported when it is first used.
    "paceline.start": [sys.executable, "-c", "import paceline; paceline.start"],
    "paceline --help": [str(BESIDE / "paceline"), "--help"],
}

SETUP = """
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
points = torch.rand(1024, 2) * 2 - 1
data = TensorDataset(points, (points.norm(dim=1) < 0.8).long())
model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
"""
LOOP = """
for _ in range(3):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
ADAMW = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"
PLAIN = SETUP + ADAMW + "loader = DataLoader(data, batch_size=64, shuffle=True)\n" + LOOP
OURS = (
    SETUP
    + ADAMW
    + """
import paceline as pl

with pl.start() as run:
    loader = DataLoader(data, batch_size=64, shuffle=True)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
"""
    + LOOP.replace("\n", "\n    ").replace("range(3)", "run.epochs(3)")
)
DDP = (
    "import torch.distributed as dist\n"
    + SETUP
    + """
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(model)
loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
"""
    + ADAMW
    + LOOP
    + "dist.destroy_process_group()\n"
)
TRIES = 3  # torchrun's workers sometimes abort at their end; such a start is repeated


def trainings(folder: Path) -> dict[str, list[str]]:
    """Write the scripts into a folder, and return the command that starts each."""
    for name, script in (("plain", PLAIN), ("ours", OURS), ("ddp", DDP)):
        (folder / f"{name}.py").write_text(script)
    return {
        "plain loop": [sys.executable, "plain.py"],
        "one worker": [sys.executable, "ours.py"],
        "two workers": [str(BESIDE / "paceline"), "run", "--quiet", "--workers", "2", "ours.py"],
        "torchrun": [str(BESIDE / "torchrun"), "--nproc-per-node", "2", "ddp.py"],
    }


def timing(command: Sequence[str], folder: Path | None = None) -> Callable[[], float]:
    """Make a function that runs a command in a folder, and returns its wall-clock seconds."""

    def run() -> float:
        for _ in range(TRIES):
            start = time.perf_counter()
            environ = {**os.environ, **ONE_THREAD}
            process = subprocess.run(
                command, check=False, cwd=folder, capture_output=True, text=True, env=environ
            )
            if process.returncode == 0:
                return time.perf_counter() - start
        raise RuntimeError(
            f"{command} failed with exit code {process.returncode}:\n{process.stderr[-4000:]}"
        )

    return run


def main() -> None:
    options = arguments(__doc__ or "", "startup", rounds=20).parse_args()
    # Check first that the help is shown without torch.
    check = SHOW + "if 'torch' in sys.modules: sys.exit('paceline --help imports torch')\n"
    subprocess.run([sys.executable, "-c", check], check=True, stdout=subprocess.DEVNULL)
    samples = interleave(
        {name: timing(command) for name, command in COMMANDS.items()}, options.rounds
    )
    medians = {name: statistics.median(values) for name, values in samples.items()}
    start_medians = {name: medians[name] for name in ("import torch", "paceline.start")}
    rows = [
        Row(
            "start",
            start_medians,
            "paceline.start / import torch",
            ratio(samples["paceline.start"], samples["import torch"]),
            most=1.15,
        ),
        Row(
            "help",
            {"paceline --help": medians["paceline --help"]},
            "seconds",
            bootstrap(float, samples["paceline --help"]),
            most=HELP_SECONDS,
        ),
    ]
    with tempfile.TemporaryDirectory() as folder:
        commands = {
            name: timing(command, Path(folder)) for name, command in trainings(Path(folder)).items()
        }
        samples |= interleave(commands, max(7, options.rounds // 2))
    for our_name, their_name, bar in (
        ("one worker", "plain loop", None),
        ("two workers", "torchrun", 1.0),
    ):
        train_medians = {name: statistics.median(samples[name]) for name in (their_name, our_name)}
        rows.append(
            Row(
                "train",
                train_medians,
                f"{our_name} / {their_name}",
                ratio(samples[our_name], samples[their_name]),
                most=bar,
            )
        )
    added_seconds = [
        our_seconds - their_seconds
        for our_seconds, their_seconds in zip(
            samples["one worker"], samples["plain loop"], strict=True
        )
    ]
    rows.append(
        Row(
            "train",
            {},
            "one worker - plain loop, seconds",
            bootstrap(float, added_seconds),
            most=0.5,
        )
    )
    # Rounds in which paceline run took at least as long as torchrun.
    lost_pairs = sum(
        our_seconds >= their_seconds
        for our_seconds, their_seconds in zip(
            samples["two workers"], samples["torchrun"], strict=True
        )
    )
    rows.append(
        Row("train", {}, "pairs that torchrun wins", bootstrap(float, [lost_pairs]), most=0)
    )
    if not report("startup", rows, options, samples) and options.check:
        sys.exit(1)


if __name__ == "__main__":
    main()
