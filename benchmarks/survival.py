"""What surviving costs while nobody dies, and how long the others stand still when somebody does: a GPT of 0.9 M or 19 M parameters.

    python benchmarks/survival.py cost  [--model small --workers 2 --batch 12 --blocks 40]
    python benchmarks/survival.py kills [--model small --workers 4 --batch 4 --kills 5]

`cost` trains with and without in turns, block by block within the same run, and gives the ratio of the median steps with its 90 % interval.
`kills` ends a random worker by SIGKILL at a random moment, again and again (each is started anew), and gives what lies between two commits
of the others, less the median step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from harness import ratio

BLOCK = 8  # steps in a row with or without
FIRST = 6  # steps that aren't measured
BETWEEN = (4.0, 8.0)  # seconds between two kills: who was killed is back by then


def train(options: argparse.Namespace) -> None:
    """The script of each worker."""
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, Dataset

    import paceline as pl
    from paceline.bench.training import CONTEXT, MODELS, VOCAB, Decoder

    tokens = torch.randint(0, VOCAB, (64 * options.batch, CONTEXT + 1), generator=torch.Generator().manual_seed(0))

    class Endless(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return options.steps * options.batch * options.workers

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            row = tokens[index % len(tokens)]
            return row[:-1], row[1:]

    torch.manual_seed(0)
    out = Path(options.out)
    with pl.start(folder=str(out), trace="off") as run, (out / f"steps-{os.getpid()}").open("a") as log:
        model = Decoder(*MODELS[options.model])
        optimizer = torch.optim.AdamW(model.parameters())
        loader = DataLoader(Endless(), batch_size=options.batch * options.workers)
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        surviving = None
        for _ in run.epochs(1):
            for x, y in loader:
                if options.what == "cost" and run.steps >= FIRST:
                    surviving = surviving or (run._agreement.recovery, run._turns.undo)
                    on = (run.steps // BLOCK) % 2 == 0
                    run._agreement.recovery, run._turns.undo = surviving if on else (None, None)
                F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
                log.write(f"{run.steps} {time.time()}\n")
                log.flush()
                if (out / "enough").exists():
                    run.stop()
        if surviving is not None:
            run._agreement.recovery, run._turns.undo = surviving


def moments(out: Path) -> list[float]:
    """When each step was taken, by the worker that took it last."""
    found: dict[int, float] = {}
    for path in out.glob("steps-*"):
        for line in path.read_text().splitlines():
            step, moment = line.split()
            found[int(step)] = max(found.get(int(step), 0.0), float(moment))
    return [found[step] for step in sorted(found)]


def launch(options: argparse.Namespace, out: Path, *more: str) -> subprocess.Popen[bytes]:
    """The job, in the background."""
    given = [f"--{name}={getattr(options, name)}" for name in ("model", "batch", "workers", "steps")]
    command = ["paceline", "run", "--workers", str(options.workers), "--min-workers", "1", *more, __file__, options.what, *given]
    return subprocess.Popen([sys.executable, "-m", *command, f"--out={out}"], stderr=subprocess.DEVNULL)


def cost(options: argparse.Namespace, out: Path) -> dict[str, float]:
    """Median steps (seconds) with and without, and their ratio."""
    options.steps = 2 * BLOCK * options.blocks + FIRST
    assert launch(options, out).wait() == 0
    found = moments(out)
    blocks: list[float] = []  # the median step of each; the first of a block is half of the other kind
    for start in range(2 * BLOCK, len(found) - BLOCK, BLOCK):
        blocks.append(statistics.median(found[step] - found[step - 1] for step in range(start + 1, start + BLOCK)))
    on, off = blocks[::2], blocks[1::2]
    pairs = min(len(on), len(off))
    found_ratio = ratio(on[:pairs], off[:pairs])
    return {"with": statistics.median(on), "without": statistics.median(off), **found_ratio._asdict()}


def kills(options: argparse.Namespace, out: Path) -> dict[str, float]:
    """What kills cost, in seconds."""
    import psutil

    chance, options.steps = random.Random(options.seed), 10**6
    job = launch(options, out, "--restarts", str(options.kills))
    killed = []
    while len(list(out.glob("steps-*"))) < options.workers:
        time.sleep(0.1)
    for _ in range(options.kills):
        while len(psutil.Process(job.pid).children()) <= options.workers:  # the launcher has a deputy, too
            time.sleep(0.1)
        time.sleep(chance.uniform(*BETWEEN))
        victim = chance.choice([child for child in psutil.Process(job.pid).children() if __file__ in child.cmdline()])
        victim.send_signal(signal.SIGKILL)
        killed.append(time.time())
    time.sleep(BETWEEN[1])
    (out / "enough").touch()
    job.wait()
    found = moments(out)
    gaps = list(pairwise(found))
    usual = statistics.median(after - before for before, after in gaps)
    lost = [max(after - before for before, after in gaps if before <= moment + 3 and after >= moment) - usual for moment in killed]
    return {"step": usual, "median": statistics.median(lost), "worst": max(lost), "kills": len(lost)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "kills"))
    parser.add_argument("--model", default="small", help="small (0.9 M parameters) or medium (19 M)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=12, help="samples in a step, for each worker")
    parser.add_argument("--blocks", type=int, default=40, help="blocks of steps with, and as many without")
    parser.add_argument("--kills", type=int, default=5, help="each waits twice as long to be started again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out:
        train(options)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        found = (cost if options.what == "cost" else kills)(options, Path(folder))
    print(json.dumps({"model": options.model, "workers": options.workers, **{name: round(value, 4) for name, value in found.items()}}))


if __name__ == "__main__":
    main()
