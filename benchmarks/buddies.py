"""Measures the cost of copying unreplicated state to another host.

Two hosts of a lab train a GPT of 0.9 M or 19 M parameters.

    python benchmarks/buddies.py [--sync 'LocalSGD(16)'] [--model small --batch 12 --blocks 40]
                                 [--bandwidth 1gbit --replicate auto]

Blocks of steps with and without copies take turns in the same run. The result has the ratio of the
mean steps with its 90 % interval (the bar is 1.10), and the run's lines about how often it made
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

BLOCK = 16  # steps of a block; the period of a strategy has to divide it
SETTLED = 64  # steps after which the run has decided how often to make copies
NEVER = 1 << 60  # a step that is never reached


def train(options: argparse.Namespace) -> None:
    """Train on one worker, and log the time of each step."""
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

    # The few sequences of tokens are repeated, as only the time matters.
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
                # Move the step from which on there are copies into the past or the future.
                if run.steps >= SETTLED:
                    buddies._first_copied_step = 0 if (run.steps // BLOCK) % 2 == 0 else NEVER
                F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
                log.write(f"{run.steps} {time.time()}\n")
                log.flush()


def measure(options: argparse.Namespace, out: Path) -> dict[str, object]:
    """Measure mean steps (seconds) with and without copies, and their ratio."""
    from paceline import lab

    train_options = [
        f"--{name}={getattr(options, name)}" for name in ("model", "batch", "blocks", "replicate")
    ]
    with lab.cluster(hosts=2, workers=1, bandwidth=options.bandwidth) as cluster:
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        outcome = cluster.run(
            __file__,
            *train_options,
            f"--out={out}",
            sync=options.sync,
            min_workers=1,
            environ=environ,
        )
    assert outcome.code == 0, outcome.output
    step_ends = moments(out)
    # Mean steps of blocks, from the end of the step before. Blocks with copies are even.
    block_means = [
        (step_ends[start + BLOCK - 1] - step_ends[start - 1]) / BLOCK
        for start in range(SETTLED, len(step_ends) - BLOCK + 1, BLOCK)
    ]
    with_copies, without_copies = block_means[::2], block_means[1::2]
    notes = [
        line.partition("buddy snapshots ")[2]
        for line in outcome.output.splitlines()
        if "buddy snapshots" in line
    ]
    value = ratio(with_copies, without_copies)
    return {
        "with": round(statistics.median(with_copies), 4),
        "without": round(statistics.median(without_copies), 4),
        "ratio": [round(bound, 3) for bound in value],
        "held": value.value <= 1.10,
        "said": notes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sync", default="AllReduce(codec=error_feedback(int8()))")
    parser.add_argument(
        "--model", default="small", help="small (0.9 M parameters) or medium (19 M)"
    )
    parser.add_argument("--batch", type=int, default=12, help="samples of a step, for each worker")
    parser.add_argument(
        "--blocks", type=int, default=40, help="blocks of steps with copies, and as many without"
    )
    parser.add_argument("--bandwidth", default="1gbit", help="bandwidth of each host")
    parser.add_argument(
        "--replicate", default="auto", help="auto, or the number of steps between copies"
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
