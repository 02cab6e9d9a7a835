"""Broadcast and gather whole states: parameters, the state of an optimizer, any object."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.bridges.horovod.common.process_sets import ProcessSet, global_process_set
from paceline.bridges.horovod.torch.autograd import grouped_allgather
from paceline.bridges.horovod.torch.mpi_ops import (
    broadcast_,
    broadcast_async_,
    rank,
    synchronize,
)


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Give all ranks the values of rank `root_rank`, in place.

    Args:
        params: `model.state_dict()`, `model.named_parameters()` or `model.parameters()`.
        root_rank: The rank whose values all get.
    """
    if isinstance(params, Mapping):
        params = sorted(params.items())
    elif not isinstance(params, Iterable) or isinstance(params, str | Tensor):
        raise ValueError(f"invalid params of type: {type(params)}")
    pairs = [item if isinstance(item, tuple) else (None, item) for item in params]
    for handle in [
        broadcast_async_(tensor, root_rank, name)
        for name, tensor in pairs
        if isinstance(tensor, Tensor)
    ]:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None
) -> None:
    """Give the optimizers of all ranks the state of the one on rank `root_rank`.

    Args:
        optimizer: An optimizer of torch, also one from `DistributedOptimizer`.
        root_rank: The rank whose state all get.
        model: Not needed here. Horovod uses it to find parameters with sparse gradients.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    state = broadcast_object(optimizer.state_dict(), root_rank, name="optimizer_state")
    if rank() != root_rank:
        optimizer.load_state_dict(state)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of rank `root_rank`, on all ranks.

    Args:
        obj: Any object that pickle can write, or cloudpickle if it is installed.
        root_rank: The rank whose object all get. Default: 0.
        name: Name of the operation. Default: from the class of the object.
        process_set: Ranks that take part. Default: all.
    """
    name = name or type(obj).__name__
    is_root = rank() == root_rank
    packed = _pack_object(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    count = broadcast_(
        torch.tensor([len(packed)], dtype=torch.int64), root_rank, f"{name}.sz", process_set
    )
    if not is_root:
        packed = torch.empty(int(count), dtype=torch.uint8)
    packed = broadcast_(packed, root_rank, f"{name}.t", process_set)
    return obj if is_root else _unpack_object(packed)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, in rank order. Arguments as in `broadcast_object`."""
    name = name or type(obj).__name__
    packed = _pack_object(obj)
    sizes, payload = grouped_allgather(
        [torch.tensor([len(packed)], dtype=torch.int64), packed], f"{name}.object", process_set
    )
    return [_unpack_object(part) for part in payload.split(sizes.tolist())]


def _pack_object(obj: Any) -> Tensor:
    try:
        # it writes functions and classes of the script, too
        pickler: Any = importlib.import_module("cloudpickle")
    except ImportError:
        pickler = pickle
    return torch.frombuffer(bytearray(pickler.dumps(obj)), dtype=torch.uint8)


def _unpack_object(packed: Tensor) -> Any:
    return pickle.loads(packed.numpy().tobytes())
