"""Compares a step of `pl.pipeline` with torch.distributed.pipelining by hand.

The model is a GPT of 19 M parameters on two stages, with the same samples.

    paceline run --workers 2 benchmarks/stages.py [--rounds 30] [--schedules 1f1b gpipe zero-bubble]

Steps of all variants take turns in the same processes, and their losses have to agree. A step of
`pl.pipeline` with 1f1b takes at most 1.05 of that of torch's 1f1b on Gloo. So does torch's 1f1b on
the backend "paceline".
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.apps.gpt import GPT, MEDIUM, GPTShape, next_token_loss

BAR = 1.05  # highest ratio to torch's step on Gloo
AWAY = 1e-5  # largest relative difference of losses
WARMUP = 3

Step = Callable[[Any, Any], float]  # trains on a batch, and returns the loss


def model(shape: GPTShape) -> Any:
    torch.manual_seed(0)
    return GPT(shape)


class Embedding(nn.Module):
    """The first layers of a GPT, in the form that torch's stages need."""

    def __init__(self, whole: Any, blocks: int) -> None:
        super().__init__()
        self.tokens, self.positions, self.blocks = (
            whole.tokens,
            whole.positions,
            whole.blocks[:blocks],
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.blocks(
            self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        )
        return out


def by_hand(shape: GPTShape, group: Any, micro_batches: int) -> Step:
    """Cut a GPT in the middle, as in the tutorial of torch.distributed.pipelining.

    Args:
        shape: Sizes of the GPT.
        group: Both workers. None: the default group.
        micro_batches: Number of micro-batches.
    """
    gpt, rank, middle = model(shape), dist.get_rank(), shape.layers // 2
    # Rank 0 has the first half of the blocks, rank 1 the rest.
    part = (
        Embedding(gpt, middle)
        if rank == 0
        else nn.Sequential(*gpt.blocks[middle:], gpt.norm, gpt.head)
    )
    stage = PipelineStage(part, rank, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=next_token_loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=1e-3)

    def step(x: Any, y: Any) -> float:
        optimizer.zero_grad()
        losses: list[Any] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        optimizer.step()
        loss = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.broadcast(loss, 1, group=group)  # run.step returns the loss on all workers, too
        return float(loss.detach())

    return step


def ours(run: Any, shape: GPTShape, schedule: str, micro_batches: int) -> Step:
    """Cut a GPT in the middle with paceline.

    Args:
        run: The run.
        shape: Sizes of the GPT.
        schedule: Name of the schedule.
        micro_batches: Number of micro-batches.
    """
    gpt, middle = model(shape), shape.layers // 2
    optimizer = torch.optim.SGD(gpt.parameters(), lr=1e-3)
    # These schedules have several stages on each worker, so their split is not in the middle.
    split_option = (
        {}
        if schedule in ("zbv", "interleaved")
        else {"split": [2 + middle, shape.layers - middle + 2]}
    )
    cut = pl.pipeline(
        "tokens, positions, blocks.*, norm, head",
        schedule=schedule,
        micro_batches=micro_batches,
        **split_option,
    )
    gpt, optimizer = run.prepare(gpt, optimizer, cut=cut)

    def step(x: Any, y: Any) -> float:
        optimizer.zero_grad()
        loss = run.step(gpt, x, y, loss=next_token_loss)
        optimizer.step()
        return float(loss)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "gpipe", "zero-bubble"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    count = options.batch * (options.rounds + WARMUP)
    tokens = torch.randint(
        MEDIUM.vocab, (count, MEDIUM.context + 1), generator=torch.Generator().manual_seed(1)
    )
    with pl.start(mesh="stage", name="stages") as run:
        steps = {
            "torch on gloo": by_hand(MEDIUM, dist.new_group(backend="gloo"), options.micro_batches),
            "torch on paceline": by_hand(MEDIUM, None, options.micro_batches),
        }
        steps |= {
            name: ours(run, MEDIUM, name, options.micro_batches) for name in options.schedules
        }
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for x, y in run.prepare(
            DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=options.batch)
        ):
            losses = []
            for name, step in steps.items():
                dist.barrier()
                start = time.perf_counter()
                losses.append(step(x, y))
                dist.barrier()
                seconds[name].append(time.perf_counter() - start)
            # All variants train on the same batch, so their losses agree.
            if max(losses) - min(losses) > AWAY * max(losses):
                raise RuntimeError(f"losses differ: {dict(zip(steps, losses, strict=True))}")
        failure = ""
        for name, step_seconds in seconds.items():
            # Ratios within steps, because the speed of the machine drifts.
            ratio = statistics.median(
                ours_seconds / torch_seconds
                for ours_seconds, torch_seconds in zip(
                    step_seconds[WARMUP:], seconds["torch on gloo"][WARMUP:], strict=True
                )
            )
            has_bar = name in ("1f1b", "torch on paceline")
            bar = f" (at most {BAR})" if has_bar else ""
            run.print(
                f"{name:18} {statistics.median(step_seconds[WARMUP:]) * 1e3:8.1f} ms   "
                f"{ratio:.3f} of torch's 1f1b on Gloo{bar}"
            )
            if has_bar and ratio > BAR and run.is_first:
                failure = f"{name} takes {ratio:.3f} of torch's step on Gloo, more than {BAR}"
    if failure:
        raise SystemExit(failure)


if __name__ == "__main__":
    main()
