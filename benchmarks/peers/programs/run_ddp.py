"""torch's DistributedDataParallel: plain, with a bucket size given or tried out, with its fp16
and PowerSGD hooks, as post-local SGD.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable

import torch.distributed as dist
import workload
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

DEFAULT = 25.0  # MB in a bucket, as DDP has it
PERIOD = 4  # steps from one average to the next; the driver's step counts are multiples of it

Pair = tuple[nn.Module, optim.Optimizer]


def plain(job: workload.Job, model: DistributedDataParallel) -> Pair:
    """Float32 gradients."""
    return model, job.optimizer(model)


def fp16(job: workload.Job, model: DistributedDataParallel) -> Pair:
    """Gradients rounded to half precision on the way."""
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return model, job.optimizer(model)


def powersgd(job: workload.Job, model: DistributedDataParallel) -> Pair:
    """Gradients as rank-1 matrices, with error feedback, from the third step on."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model, job.optimizer(model)


def local(job: workload.Job, model: DistributedDataParallel) -> Pair:
    """The mean of the gradients while warming up, then of the parameters, every `PERIOD` steps;
    the last step is one of those.
    """
    warm = job.warm - 1
    mine = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    state = post_localSGD_hook.PostLocalSGDState(
        None, mine, warm, post_local_gradient_allreduce=False
    )
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    return model, PostLocalSGDOptimizer(
        job.optimizer(model), PeriodicModelAverager(period=PERIOD, warmup_steps=warm)
    )


HOOKS: dict[str, Callable[[workload.Job, DistributedDataParallel], Pair]] = {
    "plain": plain,
    "fp16": fp16,
    "powersgd": powersgd,
    "local": local,
}


def try_sizes(job: workload.Job, sizes: list[float]) -> dict[float, float]:
    """Median seconds of a step with each bucket size, all in turn, `steps` times; the slowest
    worker counts.
    """
    programs = []
    for size in sizes:
        model = DistributedDataParallel(copy.deepcopy(job.model), bucket_cap_mb=size)
        programs.append((model, job.optimizer(model)))
    taken: dict[float, list[float]] = {size: [] for size in sizes}
    batches = iter(job.dealt(dist.get_rank(), dist.get_world_size()))
    x, y = next(batches)
    for index in range(-job.warm, job.steps):
        for size, (model, optimizer) in zip(sizes, programs, strict=True):
            dist.barrier()
            start = time.perf_counter()
            workload.loss_of(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if index >= 0:
                taken[size].append(time.perf_counter() - start)
    answers: list[dict[float, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(
        answers, {size: statistics.median(seconds) for size, seconds in taken.items()}
    )
    return {size: max(answer[size] for answer in answers) for size in sizes}


def options() -> argparse.Namespace:
    arguments = workload.parser(__doc__)
    arguments.add_argument("--hook", choices=list(HOOKS), default="plain")
    arguments.add_argument(
        "--bucket-mb", type=float, default=DEFAULT, help="size of the buckets (default %(default)s)"
    )
    arguments.add_argument(
        "--try-buckets",
        type=float,
        nargs="+",
        metavar="MB",
        help="time these sizes, write OUT/buckets.json, and end",
    )
    return arguments.parse_args()


def main() -> None:
    asked = options()
    job = workload.Job(asked)
    dist.init_process_group("gloo")
    if asked.try_buckets:
        tried = try_sizes(job, asked.try_buckets)
        if dist.get_rank() == 0:
            (asked.out / "buckets.json").write_text(json.dumps(tried))
    else:
        model, optimizer = HOOKS[asked.hook](
            job, DistributedDataParallel(job.model, bucket_cap_mb=asked.bucket_mb)
        )
        job.train(model, optimizer, job.dealt(dist.get_rank(), dist.get_world_size()))
        job.finish(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
    workload.leave()


if __name__ == "__main__":
    main()
