"""Measures ways to train a GPT with wide layers over a slow link.

    for way in ddp all-reduce int8 sharded pipeline 'pipelines, LocalSGD'; do
        paceline lab run CLUSTER benchmarks/wide.py --way "$way"
    done

CLUSTER has two hosts of two workers, with 100 Mbit/s between them. The model has d=1024, 8 layers
and 16 tokens at once: many parameters and few activations. `ddp` is torch's DDP on Gloo, the others
are ways of paceline. The summary of each run has its bytes. The pipeline has to be five times as
fast as DDP.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.apps.gpt import GPT, GPTShape, next_token_loss

SHAPE = GPTShape(d=1024, layers=8, heads=8, context=16, vocab=256)
LAYERS = "tokens, positions, blocks.*, norm, head"
# Mesh and cut of each way.
WAYS = {
    "all-reduce": ("data", None),
    "int8": ("data", None),
    "sharded": ("shard", 'shard("blocks.*")'),
    "pipeline": ("stage", f'pipeline("{LAYERS}", micro_batches=8)'),
    "pipelines, LocalSGD": ("data=2, stage=2", f'pipeline("{LAYERS}", micro_batches=4)'),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--way",
        choices=["ddp", *WAYS],
        required=True,
        help="a way; each has a mesh of its own, so a run has one",
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokens = torch.randint(
        SHAPE.vocab,
        (options.batch * (options.steps + 1), SHAPE.context + 1),
        generator=torch.Generator().manual_seed(1),
    )
    mesh, cut = WAYS.get(options.way, ("data", None))
    sync = {
        "int8": pl.AllReduce(codec=pl.int8()),
        "pipelines, LocalSGD": pl.LocalSGD(options.steps, outer=pl.nesterov(0.7, 0.9)),
    }
    torch.manual_seed(0)
    model: Any = GPT(SHAPE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pl.start(sync.get(options.way, pl.AllReduce()), mesh=mesh, name="wide") as run:
        data = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=options.batch)
        stamps: list[float] = []  # before each step after the first, and at the end
        step: Callable[[Any, Any], Any]
        if options.way == "ddp":
            wrapped = DistributedDataParallel(model, process_group=dist.new_group(backend="gloo"))

            def step(x: Any, y: Any) -> Any:
                next_token_loss(wrapped(x), y).backward()

            # Each worker takes its part of each global batch.
            batches: Any = [
                (x.chunk(run.size)[run.rank], y.chunk(run.size)[run.rank]) for x, y in data
            ]
        else:
            model, optimizer, batches = run.prepare(model, optimizer, data, cut=cut)

            def step(x: Any, y: Any) -> Any:
                return run.step(model, x, y, loss=next_token_loss)

        for x, y in batches:
            # The stamps of all workers are those of the same moment.
            run.barrier()
            stamps.append(time.perf_counter())
            optimizer.zero_grad()
            step(x, y)
            optimizer.step()
        run.barrier()
        stamps.append(time.perf_counter())
        run.print(
            f"{options.way:20} {(stamps[-1] - stamps[1]) / options.steps:8.2f} s a step, with the "
            "exchanges between steps"
        )


if __name__ == "__main__":
    main()
