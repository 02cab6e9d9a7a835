"""Compares sharding inside of hosts, and a strategy between them, with FSDP2 and HSDP on Gloo.

The model is a GPT of 19 M parameters on two hosts of two workers.

    paceline lab run two-hosts benchmarks/hybrid.py [--rounds 8] [--steps 4]
    paceline lab run --sync 'LocalSGD(16, outer=nesterov(0.7, 0.9))' two-hosts \\
        benchmarks/hybrid.py --steps 16 --bars 5 0

All three train in the same processes and take turns. FSDP2 shards over all four workers. HSDP
shards inside of hosts, and replicates between them.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from sharding import by_hand, stepping
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, TensorDataset
from training import build

import paceline as pl

MODEL = "gpt-19m"
BATCH = 8  # samples of a step, of all workers together
NEAR = 1e-4  # largest difference of first losses; all models begin equal
BARS = (2.5, 1.5)  # lowest ratios to FSDP2 and to HSDP


def gloo(groups: list[list[int]]) -> Any:
    """Make groups of Gloo, and return the one that has this worker. Collective."""
    group_by_ranks = {tuple(ranks): dist.new_group(ranks, backend="gloo") for ranks in groups}
    return next(group for ranks, group in group_by_ranks.items() if dist.get_rank() in ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="steps of each in a round")
    parser.add_argument("--bars", type=float, nargs=2, default=BARS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    with pl.start("AllReduce(codec=int8())", mesh="data=2, shard=2", name="hybrid") as run:
        # Ranks 0 and 3 are on different hosts.
        hosts = [list(run.mesh.ranks_along(rank, ["shard"])) for rank in (0, 3)]
        across = [list(run.mesh.ranks_along(rank, ["data"])) for rank in hosts[0]]
        all_workers = DeviceMesh.from_group(gloo([[0, 1, 2, 3]]), "cpu")
        # HSDP's mesh has a row for each host.
        grid = DeviceMesh.from_group(
            [gloo(across), gloo(hosts)],
            "cpu",
            mesh=torch.tensor(hosts),
            mesh_dim_names=("replicate", "shard"),
        )
        model, _, data = build(MODEL)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        ours = run.prepare(model, optimizer, cut=pl.shard("blocks.*"))
        variants = {
            "fsdp2": by_hand(build(MODEL)[0], mesh=all_workers),
            "hsdp": by_hand(build(MODEL)[0], mesh=grid),
            "paceline": ours,
        }
        steps = {name: stepping(*variant) for name, variant in variants.items()}
        rounds = options.rounds + 1
        # The same few batches in each round, so that losses fall.
        tokens = TensorDataset(
            *(
                torch.stack(part)
                for part in zip(
                    *(data[index] for index in range(BATCH * options.steps)), strict=True
                )
            )
        )
        loader = run.prepare(DataLoader(tokens, batch_size=BATCH))
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        losses: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(rounds):
            for name, step in steps.items():
                run.barrier()
                start = time.perf_counter()
                losses[name] += [step(x, y) for x, y in loader]
                run.barrier()
                seconds[name].append((time.perf_counter() - start) / options.steps)
        # Equal first losses show equal models and data. Falling losses show that all of them train.
        if any(
            abs(values[0] - losses["fsdp2"][0]) > NEAR or not values[-1] < values[0]
            for values in losses.values()
        ):
            raise RuntimeError(f"first losses differ, or losses don't fall: {losses}")
        for name, step_seconds in seconds.items():
            run.print(f"{name:9} {statistics.median(step_seconds[1:]) * 1e3:8.1f} ms a step")
        for name, bar in zip(("fsdp2", "hsdp"), options.bars, strict=True):
            speed_up = statistics.median(
                theirs / ours_seconds
                for theirs, ours_seconds in zip(
                    seconds[name][1:], seconds["paceline"][1:], strict=True
                )
            )
            run.print(f"{speed_up:.2f} times as fast as {name} on Gloo (at least {bar:g})")


if __name__ == "__main__":
    main()
