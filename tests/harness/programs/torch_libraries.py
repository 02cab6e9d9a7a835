"""A script on torch.distributed alone: DDP, FSDP2, tensor parallelism, a pipeline and torch's own
calls, on the backends given.

Rank 0 prints what came of each on each backend as JSON; the numbers are those of the workers'
different data.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# first, as a stand-in for that module would load it in the middle of the next ones
from torch._dynamo import eval_frame  # noqa: F401
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import paceline.backend  # noqa: F401

warnings.filterwarnings("ignore", category=FutureWarning)
WIDTH = 12


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.Tanh(),
        nn.Linear(2 * WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, 1),
    )


def batch(rank: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank))
    return x, x.sum(1, keepdim=True)


def numbers(parameters: Any) -> list[float]:
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in parameters]
    return [float(p.detach().double().sum()) for p in whole]


def trained(model: nn.Module, rank: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = batch(rank)
    for _ in range(5):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return numbers(model.parameters())


def uneven(backend: str, rank: int) -> list[float]:
    """Buckets of DDP that are worth moving, and a rank that runs out of batches before the
    others, whose sums it then joins.
    """
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(WIDTH, 400), nn.Tanh(), nn.Linear(400, 400)),
        gradient_as_bucket_view=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with model.join():
        for turn in range(8 if rank else 5):
            optimizer.zero_grad()
            model(batch(10 * turn + rank)[0]).square().mean().backward()
            optimizer.step()
    shared = {
        p.grad.untyped_storage().is_shared() for p in model.parameters() if p.grad is not None
    }
    print(f"{backend}: gradients are in memory of all ranks: {shared}", flush=True)
    return numbers(model.parameters())


def tensor_parallel(mesh: Any) -> nn.Module:
    return parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def sharded() -> nn.Module:
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    return model


def pipeline(rank: int, size: int) -> list[float]:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(size)]
    schedule = Schedule1F1B(
        PipelineStage(layers[rank], rank, size, torch.device("cpu")), 4, loss_fn=F.mse_loss
    )
    x = batch(0)[0]
    losses: list[Tensor] = []
    if rank == 0:
        schedule.step(x)
    elif rank == size - 1:
        schedule.step(target=x, losses=losses)
    else:
        schedule.step()
    gradients = torch.zeros(size)
    gradients[rank] = layers[rank].weight.grad.double().square().sum()
    dist.all_reduce(gradients)
    return [float(x) for x in gradients]


def calls(rank: int, size: int, mesh: Any) -> dict[str, Any]:
    """What torch.distributed's own functions give."""
    found: dict[str, Any] = {}
    x = torch.arange(4.0) + rank
    work = dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True)
    work.wait()
    found["max"] = x.tolist()
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    dist.broadcast_object_list(told := [f"from {rank}"], src=1)
    found["objects"], found["told"] = objects, told
    x = torch.tensor([float(rank)])
    sent = [
        dist.P2POp(dist.isend, x, (rank + 1) % size),
        dist.P2POp(dist.irecv, got := torch.zeros(1), (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(sent):
        work.wait()
    found["from my left"] = got.tolist()
    if rank == 0:
        found["from"] = [dist.recv(got), *got.tolist()]
    elif rank == 1:
        dist.send(x + 40, 0)
    odd = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        dist.all_reduce(x, group=odd)
    found["two of them"] = x.tolist()
    found["functional"] = (functional.all_reduce(x, "sum", dist.group.WORLD) + 0).tolist()
    rows = distribute_tensor(torch.arange(float(2 * size)), mesh, [Shard(0)])
    found["redistributed"] = rows.redistribute(mesh, [Replicate()]).to_local().tolist()
    dist.barrier()
    return found


def found(backend: str, store: Any, rank: int, size: int) -> dict[str, Any]:
    """What comes of everything on a backend."""
    dist.init_process_group(
        backend, store=dist.PrefixStore(backend, store), rank=rank, world_size=size
    )
    mesh = init_device_mesh("cpu", (size,))
    results = {
        "ddp": trained(DistributedDataParallel(network()), rank),
        "uneven": uneven(backend, rank),
        "fsdp2": trained(sharded(), rank),
        "tensor": trained(tensor_parallel(mesh), 0),
        "pipeline": pipeline(rank, size),
        **calls(rank, size, mesh),
        "backend": dist.get_backend(),
    }
    dist.destroy_process_group()
    return results


def main() -> None:
    torch.set_num_threads(1)
    store, rank, size = next(dist.rendezvous("env://"))
    results = [found(backend, store, rank, size) for backend in sys.argv[1:]]
    if rank == 0:
        print("FOUND", json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
