"""Compares `pl.shard` with FSDP2 by hand, both on paceline's backend.

The GPT, AdamW and the samples are the same, and steps take turns in the same processes.

    paceline run --workers 2 benchmarks/sharding.py [--rounds 30] [--width 256]

The losses of all variants have to be equal to the bit. A step of `pl.shard(zero=3)` takes at most
1.03 of that of FSDP2.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.apps.gpt import GPT, GPTShape, next_token_loss

BAR = 1.03  # highest ratio to the step of FSDP2
BATCH, CONTEXT, VOCAB = 8, 64, 256
WARMUP = 3


def model(width: int) -> nn.Module:
    torch.manual_seed(0)
    return GPT(GPTShape(d=width, layers=4, heads=4, context=CONTEXT, vocab=VOCAB))


def by_hand(made: Any, **where: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Shard each block of a model, then the rest, as in the tutorial of FSDP2.

    `where` may have `mesh`. Default: all workers.
    """
    for block in made.blocks:
        fully_shard(block, **where)
    fully_shard(made, **where)
    return made, torch.optim.AdamW(made.parameters(), lr=1e-3)


def stepping(made: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Any, Any], float]:
    """Make a function that trains a GPT on a batch, and returns the loss."""

    def step(x: Any, y: Any) -> float:
        optimizer.zero_grad()
        loss = next_token_loss(made(x), y)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    count = BATCH * (options.rounds + WARMUP)
    tokens = torch.randint(VOCAB, (count, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    with pl.start(mesh="shard", name="sharding") as run:
        steps = {"fsdp2": stepping(*by_hand(model(options.width)))}
        for zero in (3, 2, 1):
            sharded_model = model(options.width)
            optimizer = torch.optim.AdamW(sharded_model.parameters(), lr=1e-3)
            steps[f"zero={zero}"] = stepping(
                *run.prepare(sharded_model, optimizer, cut=pl.shard("blocks.*", zero=zero))
            )
        loader = run.prepare(
            DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=BATCH)
        )
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for x, y in loader:
            # All variants train on the same batch, so their losses have to be equal.
            losses = set()
            for name, step in steps.items():
                # Workers begin and end together, so a step of a variant is not mixed with the next
                # one.
                dist.barrier()
                start = time.perf_counter()
                losses.add(step(x, y))
                dist.barrier()
                seconds[name].append(time.perf_counter() - start)
            if len(losses) > 1:
                raise RuntimeError(f"losses differ: {sorted(losses)}")
        for name, step_seconds in seconds.items():
            ratios = [
                ours_seconds / fsdp2_seconds
                for ours_seconds, fsdp2_seconds in zip(
                    step_seconds[WARMUP:], seconds["fsdp2"][WARMUP:], strict=True
                )
            ]
            bar = f" (at most {BAR})" if name == "zero=3" else ""
            run.print(
                f"{name:8} {statistics.median(step_seconds[WARMUP:]) * 1e3:8.1f} "
                f"ms   {statistics.median(ratios):.3f} of FSDP2's step{bar}"
            )
        median_ratio = statistics.median(
            ours_seconds / fsdp2_seconds
            for ours_seconds, fsdp2_seconds in zip(
                seconds["zero=3"][WARMUP:], seconds["fsdp2"][WARMUP:], strict=True
            )
        )
        if median_ratio > BAR:
            raise SystemExit(f"zero=3 takes {median_ratio:.3f} of FSDP2's step, more than {BAR}")


if __name__ == "__main__":
    main()
