"""Compares the measured split of layers over two unequal hosts with all other splits.

    paceline lab run CLUSTER benchmarks/splits.py [--rounds 10]

CLUSTER is a TOML file of two hosts of one worker. One of them has half of a core:

    [[host]]
    name = "fast"
    processors = 1.0

    [[host]]
    name = "slow"
    processors = 0.5

A GPT of 12 layers, tied and with a large vocabulary, goes through two stages of 1f1b. The measured
split has to be 1.35 times as fast as the even one, and within 5 % of the best. Steps of all splits
take turns in the same processes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.apps.gpt import GPT, GPTShape, next_token_loss

SHAPE = GPTShape(d=256, layers=12, heads=4, context=64, vocab=4096, tied=True)
LAYERS = "tokens, positions, blocks.*, norm, head"
COUNT = SHAPE.layers + 4  # blocks, and tokens, positions, norm, head
BARS = (1.35, 1.05)  # lowest ratio to the even split; highest ratio to the best
WARMUP = 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument(
        "--firsts",
        nargs="+",
        type=int,
        default=list(range(6, COUNT - 1)),
        help="numbers of layers in the first stage, to try by hand",
    )
    options = parser.parse_args()
    options.firsts = sorted({COUNT // 2, *options.firsts})  # with the even split
    torch.set_num_threads(1)
    count = options.batch * (options.rounds + WARMUP)
    tokens = torch.randint(
        SHAPE.vocab, (count, SHAPE.context + 1), generator=torch.Generator().manual_seed(1)
    )
    loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=options.batch)
    with pl.start(mesh="stage", name="splits") as run:
        splits: dict[str, Any] = {
            "auto": "auto",
            **{str(first): [first, COUNT - first] for first in options.firsts},
        }
        models: dict[str, tuple[Any, Any]] = {}
        for name, split in splits.items():
            torch.manual_seed(0)
            model = GPT(SHAPE)
            # "auto" measures the layers, and the loss belongs to the last of them.
            loss_option = {"loss": next_token_loss} if split == "auto" else {}
            cut = pl.pipeline(
                LAYERS, micro_batches=options.micro_batches, split=split, **loss_option
            )
            model, optimizer, prepared_loader = run.prepare(
                model, torch.optim.SGD(model.parameters(), lr=1e-3), loader, cut=cut
            )
            models[name] = model, optimizer
        seconds: dict[str, list[float]] = {name: [] for name in models}
        for x, y in prepared_loader:
            for name, (model, optimizer) in models.items():
                run.barrier()
                start = time.perf_counter()
                optimizer.zero_grad()
                run.step(model, x, y, loss=next_token_loss)
                optimizer.step()
                run.barrier()
                seconds[name].append(time.perf_counter() - start)
        medians = {
            name: statistics.median(step_seconds[WARMUP:]) for name, step_seconds in seconds.items()
        }
        for name, median in medians.items():
            # The bounds begin with 0, so the second one is the size of the first stage.
            first = next(iter(run._prepared.cuts.pipeline_of(models[name][0]).split.bounds[1:]))
            run.print(f"{name:5} {first:3} layers on the first worker {median * 1e3:8.1f} ms")
        even, best = medians[str(COUNT // 2)], min(medians[str(first)] for first in options.firsts)
        run.print(
            f"measured: {even / medians['auto']:.2f} times as fast as the even split, "
            f"{medians['auto'] / best:.2f} of the best by hand"
        )
        if even / medians["auto"] < BARS[0] or medians["auto"] / best > BARS[1]:
            raise SystemExit(
                f"bars: at least {BARS[0]} times as fast as the even split, "
                f"and at most {BARS[1]} of the best"
            )


if __name__ == "__main__":
    main()
