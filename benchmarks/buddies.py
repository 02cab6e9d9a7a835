"""What it costs to copy what only one worker has to another host: on two hosts of a lab, a GPT of
0.9 M or 19 M parameters.

    python benchmarks/buddies.py [--sync 'LocalSGD(16)'] [--model small --batch 12 --blocks 40]
                                 [--bandwidth 1gbit --replicate auto]

Trains with and without copies in turns, block by block within the same run, and gives the ratio of
the mean steps with its 90 % interval (the bar is 1.10), and what the run said of how often it made
copies.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from harness import ratio
from survival import moments

BLOCK = 16  # steps in a row with copies, or without: rounds of so many, or of a part of it, fit in
SETTLED = 64  # steps after which it has been decided how often copies are made
NEVER = 1 << 60


def train(options: argparse.Namespace) -> None:
    """The script of each worker."""
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, Dataset

    import paceline as pl
    from paceline.bench.training import CONTEXT, MODELS, VOCAB, Decoder
    from paceline.session.run import parts_of_run

    tokens = torch.randint(
        0, VOCAB, (64 * options.batch, CONTEXT + 1), generator=torch.Generator().manual_seed(0)
    )
    batch, steps = 2 * options.batch, SETTLED + 2 * BLOCK * options.blocks

    class Endless(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return steps * batch

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            row = tokens[index % len(tokens)]
            return row[:-1], row[1:]

    torch.manual_seed(0)
    out = Path(options.out)
    replicate = options.replicate if options.replicate == "auto" else int(options.replicate)
    with (
        pl.start(folder=str(out), trace="off", replicate=replicate) as run,
        (out / f"steps-{os.getpid()}").open("a") as log,
    ):
        model = Decoder(*MODELS[options.model])
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer, loader = run.prepare(
            model, optimizer, DataLoader(Endless(), batch_size=batch)
        )
        survival = parts_of_run(run).survival
        assert survival is not None
        buddies = survival.recovery._run.buddies  # type: ignore[attr-defined]
        for _ in run.epochs(1):
            for x, y in loader:
                if run.steps >= SETTLED:  # the step from which on there are copies
                    buddies._first_copied_step = 0 if (run.steps // BLOCK) % 2 == 0 else NEVER
                F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
                log.write(f"{run.steps} {time.time()}\n")
                log.flush()


def measure(options: argparse.Namespace, out: Path) -> dict[str, object]:
    """Mean steps (seconds) with and without copies, and their ratio."""
    from paceline import lab

    given = [
        f"--{name}={getattr(options, name)}" for name in ("model", "batch", "blocks", "replicate")
    ]
    with lab.cluster(hosts=2, workers=1, bandwidth=options.bandwidth) as cluster:
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = cluster.run(
            __file__, *given, f"--out={out}", sync=options.sync, min_workers=1, environ=environ
        )
    assert ended.code == 0, ended.output
    found = moments(out)
    means = [
        (found[start + BLOCK - 1] - found[start - 1]) / BLOCK
        for start in range(SETTLED, len(found) - BLOCK + 1, BLOCK)
    ]
    on, off = means[::2], means[1::2]
    said = [
        line.partition("buddy snapshots ")[2]
        for line in ended.output.splitlines()
        if "buddy snapshots" in line
    ]
    value = ratio(on, off)
    return {
        "with": round(statistics.median(on), 4),
        "without": round(statistics.median(off), 4),
        "ratio": [round(number, 3) for number in value],
        "held": value.value <= 1.10,
        "said": said,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sync", default="AllReduce(codec=error_feedback(int8()))")
    parser.add_argument(
        "--model", default="small", help="small (0.9 M parameters) or medium (19 M)"
    )
    parser.add_argument("--batch", type=int, default=12, help="samples in a step, for each worker")
    parser.add_argument(
        "--blocks", type=int, default=40, help="blocks of steps with, and as many without"
    )
    parser.add_argument("--bandwidth", default="1gbit", help="of each host")
    parser.add_argument(
        "--replicate", default="auto", help="auto, or steps from one copy to the next"
    )
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out:
        train(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        print(
            json.dumps(
                {"sync": options.sync, "model": options.model, **measure(options, Path(folder))}
            )
        )


if __name__ == "__main__":
    main()
