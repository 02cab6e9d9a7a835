"""torch's DistributedDataParallel: plain, with its fp16 hook, or as post-local SGD."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import task
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel


def sent() -> float:
    """Bytes that this host has sent so far."""
    lines = (line.split() for line in Path("/proc/self/net/dev").read_text().splitlines()[2:])
    return float(sum(int(words[9]) for words in lines if words[0] != "lo:"))


def main() -> None:
    parser = task.arguments(__doc__)
    parser.add_argument("--hook", choices=["plain", "fp16", "local"], default="plain")
    parser.add_argument("--period", type=int, default=8, help="steps from one average to the next")
    options = parser.parse_args()
    job = task.Task(options)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    course = task.Course(rank, size)
    model = DistributedDataParallel(job.model)
    inner = job.optimizer(model)
    schedule = job.schedule(inner)
    optimizer: optim.Optimizer = inner
    if options.hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if options.hook == "local":
        mine = [dist.new_group([each]) for each in range(size)][rank]
        state = post_localSGD_hook.PostLocalSGDState(
            None, mine, task.WARM, post_local_gradient_allreduce=False
        )
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        optimizer = PostLocalSGDOptimizer(
            inner, PeriodicModelAverager(period=options.period, warmup_steps=task.WARM)
        )
    sampler = job.sampler()

    def stretch() -> list[Tensor]:
        losses = []
        for batch in sampler:
            samples = [job.train[row] for row in batch[rank::size]]
            x, y = (torch.stack(part) for part in zip(*samples, strict=True))
            loss = task.loss_of(model, x, y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), task.CLIP)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.detach())
        return losses

    @torch.no_grad()
    def evaluate() -> float:
        parts = [
            (task.loss_of(job.model, x, y) * len(x), len(x))
            for x, y in list(job.held_out)[rank::size]
        ]
        total = torch.tensor(
            [float(sum(loss for loss, _ in parts)), float(sum(count for _, count in parts))]
        )
        dist.all_reduce(total)
        return float(total[0] / total[1])

    before = sent()
    job.run(course, stretch, evaluate)
    course.sent = (sent() - before) / (len(course.seconds) * options.stretch) * size
    course.write(options.out)
    dist.barrier()
    sys.stdout.flush()
    # Python's end may wait for ever for Gloo's thread (see benchmarks/peers/programs/workload.py)
    os._exit(0)


if __name__ == "__main__":
    main()
