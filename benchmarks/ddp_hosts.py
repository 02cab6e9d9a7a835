"""Compares DDP between hosts on the backends "paceline" and "gloo".

It is a script of torch.distributed alone: a GPT of 19 M parameters on two hosts of two workers.

    paceline lab run two-hosts benchmarks/ddp_hosts.py [--rounds 8] [--steps 4]

Both train in the same processes and take turns. At the end their weights have to agree.
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
BAR = 1.35  # lowest ratio to Gloo
AWAY = 1e-4  # highest |difference| / |weights| after all rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="steps of each in a round")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("paceline")
    # None is the default group, on the backend "paceline".
    groups = {"gloo": dist.new_group(backend="gloo"), "paceline": None}
    models: dict[str, Any] = {}
    steps: dict[str, Any] = {}
    for name, group in groups.items():
        plain_model, loss, data = build(MODEL)
        models[name] = DistributedDataParallel(plain_model, process_group=group)
        optimizer = torch.optim.SGD(models[name].parameters(), lr=1e-3)
        steps[name] = (
            models[name],
            loss,
            optimizer,
            endless(dealt(data, MODEL, dist.get_rank(), dist.get_world_size())),
        )
    # The first round isn't counted.
    seconds: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(options.rounds + 1):
        for name in groups:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(options.steps):
                step(*steps[name])
            dist.barrier()
            seconds[name].append((time.perf_counter() - start) / options.steps)
    weights = {
        name: torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
        for name, model in models.items()
    }
    distance = float((weights["gloo"] - weights["paceline"]).norm() / weights["gloo"].norm())
    if distance > AWAY:
        raise RuntimeError(
            f"the weights on the backends are {distance:.2e} apart, more than {AWAY:g}"
        )
    # Ratios within rounds, because the speed of the machine drifts.
    speed_up = statistics.median(
        theirs / ours
        for theirs, ours in zip(seconds["gloo"][1:], seconds["paceline"][1:], strict=True)
    )
    if dist.get_rank() == 0:
        for name, step_seconds in seconds.items():
            print(
                f"{name:9} {statistics.median(step_seconds[1:]) * 1e3:8.1f} ms a step", flush=True
            )
        print(f"DDP {speed_up:.2f} times as fast as on Gloo (at least {BAR})", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def endless(loader: Any) -> Any:
    """Yield the batches of a loader again and again."""
    while True:
        yield from loader


def step(model: Any, loss: Any, optimizer: Any, batches: Any) -> None:
    """Train one step.

    Args:
        model: The model.
        loss: Function of the output and the target.
        optimizer: The optimizer.
        batches: Iterator of batches.
    """
    x, y = next(batches)
    loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main()
