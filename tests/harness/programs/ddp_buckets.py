"""DDP in each of its ways, on the backends given: what it trains, and how many buckets were moved
to memory that all workers reach.

Rank 0 prints the results on each backend as JSON. A worker ends with an error if its weights differ
from those of others, or if its gradients go with the process group.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import paceline.backend  # noqa: F401

INPUTS, WIDTH, STEPS = 200, 400, 4


class Network(nn.Module):
    """Two buckets of DDP. `skips`: whether a layer is left out in every second step."""

    def __init__(self, seed: int = 0, *, skips: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(
            [
                nn.Linear(INPUTS, WIDTH),
                nn.Linear(WIDTH, WIDTH),
                nn.Linear(WIDTH, WIDTH),
                nn.Linear(WIDTH, 1),
            ]
        )
        self.skips = skips

    def forward(self, x: Tensor, step: int) -> Tensor:
        for number, layer in enumerate(self.layers):
            if not (self.skips and number == 1 and step % 2):
                x = layer(x).tanh()
        return x


def loss(models: list[Any], rank: int, step: int) -> Tensor:
    x = torch.randn(8, INPUTS, generator=torch.Generator().manual_seed(100 * step + rank))
    return sum(
        ((model(x, step + rank) - x[:, :1]).square().mean() for model in models), torch.zeros(())
    )


def numbers(models: list[Any]) -> list[float]:
    return [
        float(x) for model in models for p in model.parameters() for x in p.detach().view(-1)[::97]
    ]


def trained(models: list[Any], group: Any = None, *, parts: int = 1) -> list[float]:
    """Train, and check that all ranks of the group have come to the same.

    `parts`: gradients are added up over so many batches.
    """
    rank = dist.get_rank()
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=1e-2)
    for step in range(STEPS):
        for part in range(parts):
            with models[0].no_sync() if part < parts - 1 else nullcontext():
                loss(models, rank, parts * step + part).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=bool(step % 2))
    loss(models, rank, STEPS).backward()
    found = numbers(models)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, found, group=group)
    assert all(other == found for other in everyone)
    return found


def moves(group: Any) -> int:
    """How many storages a group of the backend has moved."""
    group = dist.group.WORLD if group is None else group
    return (
        int(group._issuer._met.group._paths.moved._made)
        if dist.get_backend(group) == "paceline"
        else 0
    )


def hooked(hook: Callable[..., Any]) -> list[float]:
    model = DistributedDataParallel(Network())
    model.register_comm_hook(None, hook)
    return trained([model])


def built_in() -> list[float]:
    model = DistributedDataParallel(Network())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return trained([model])


def ways(some: Any) -> dict[str, Callable[[], list[float]]]:
    return {
        "plain": lambda: trained([DistributedDataParallel(Network())]),
        "views": lambda: trained(
            [DistributedDataParallel(Network(), gradient_as_bucket_view=True)]
        ),
        "no_sync": lambda: trained(
            [DistributedDataParallel(Network(), gradient_as_bucket_view=True)], parts=2
        ),
        "unused": lambda: trained(
            [DistributedDataParallel(Network(skips=True), find_unused_parameters=True)]
        ),
        "static": lambda: trained(
            [DistributedDataParallel(Network(), static_graph=True, gradient_as_bucket_view=True)]
        ),
        "two models": lambda: trained(
            [DistributedDataParallel(Network(seed)) for seed in range(2)]
        ),
        "some ranks": lambda: (
            trained([DistributedDataParallel(Network(), process_group=some)], some)
            if some is not None
            else []
        ),
        "built-in hook": built_in,
        "hook": lambda: hooked(default_hooks.allreduce_hook),
        "fp16": lambda: hooked(default_hooks.fp16_compress_hook),
    }


@contextmanager
def group_of(backend: str, store: Any, rank: int, size: int) -> Iterator[None]:
    dist.init_process_group(
        backend, store=dist.PrefixStore(backend, store), rank=rank, world_size=size
    )
    yield
    dist.destroy_process_group()


def found(backend: str, store: Any, rank: int, size: int) -> dict[str, Any]:
    """What comes of everything on a backend, and what was moved for it."""
    results: dict[str, Any] = {}
    with group_of(backend, store, rank, size):
        pair = dist.new_group([0, size - 1])
        some = pair if rank in (0, size - 1) else None
        for group in (dist.group.WORLD, *([some] if some is not None else [])):
            dist.barrier(group)  # ranks make their group
        for name, way in ways(some).items():
            used = some if name == "some ranks" else None
            before = moves(used)
            results[name] = [way(), moves(used) - before]
        model = Network()
        trained([DistributedDataParallel(model, gradient_as_bucket_view=True)])
    outlive(model, shared=backend == "paceline")
    # the same model, whose gradients are still where they were
    with group_of(backend, dist.PrefixStore("again", store), rank, size):
        results["again"] = [
            trained([DistributedDataParallel(model, gradient_as_bucket_view=True)]),
            moves(None),
        ]
    return results


def outlive(model: nn.Module, *, shared: bool) -> None:
    """Check that gradients outlive the group, and that a forked process has its own."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert {grad.untyped_storage().is_shared() for grad in grads} == {shared}
    kept = [grad.clone() for grad in grads]
    child = os.fork()
    if child == 0:
        for grad in grads:
            grad.fill_(9)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(grads) == 8 and all(
        torch.equal(grad, value) for grad, value in zip(grads, kept, strict=True)
    )
    assert all(
        torch.equal(grad.add_(1), value + 1) for grad, value in zip(grads, kept, strict=True)
    )


def main() -> None:
    torch.set_num_threads(1)
    store, rank, size = next(dist.rendezvous("env://"))
    results = [
        found(backend, dist.PrefixStore(backend, store), rank, size) for backend in sys.argv[1:]
    ]
    if rank == 0:
        print("FOUND", json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
