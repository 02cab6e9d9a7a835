"""DDP between hosts on the backend "paceline" against Gloo: a script of torch.distributed alone, a
GPT of 19 M, two hosts of two workers.

    paceline lab run two-hosts benchmarks/ddp_hosts.py [--rounds 8] [--steps 4]

Both train in the same processes, some steps of one after some of the other, and their weights have
to agree at the end.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training import build, dealt

import paceline.backend  # noqa: F401

MODEL = "gpt-19m"
BAR = 1.35  # times as fast as Gloo, at least
AWAY = 1e-4  # |difference| / |weights| after all rounds, at most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="steps of each in a round")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("paceline")
    groups = {"gloo": dist.new_group(backend="gloo"), "paceline": None}
    models: dict[str, Any] = {}
    steps: dict[str, Any] = {}
    for name, group in groups.items():
        made, loss, data = build(MODEL)
        models[name] = DistributedDataParallel(made, process_group=group)
        optimizer = torch.optim.SGD(models[name].parameters(), lr=1e-3)
        steps[name] = (
            models[name],
            loss,
            optimizer,
            endless(dealt(data, MODEL, dist.get_rank(), dist.get_world_size())),
        )
    seconds: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(options.rounds + 1):
        for name in groups:
            dist.barrier()
            began = time.perf_counter()
            for _ in range(options.steps):
                step(*steps[name])
            dist.barrier()
            seconds[name].append((time.perf_counter() - began) / options.steps)
    weights = {
        name: torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        for name, model in models.items()
    }
    away = float((weights["gloo"] - weights["paceline"]).norm() / weights["gloo"].norm())
    if away > AWAY:
        raise RuntimeError(f"the weights on the backends are {away:.2e} apart, more than {AWAY:g}")
    times = statistics.median(
        a / b for a, b in zip(seconds["gloo"][1:], seconds["paceline"][1:], strict=True)
    )
    if dist.get_rank() == 0:
        for name, taken in seconds.items():
            print(f"{name:9} {statistics.median(taken[1:]) * 1e3:8.1f} ms a step", flush=True)
        print(f"DDP {times:.2f} times as fast as on Gloo (at least {BAR})", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def endless(loader: Any) -> Any:
    """Give batches again and again."""
    while True:
        yield from loader


def step(model: Any, loss: Any, optimizer: Any, batches: Any) -> None:
    """Take a step of training."""
    x, y = next(batches)
    loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main()
