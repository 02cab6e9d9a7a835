"""Horovod's API for PyTorch: `import paceline.bridges.horovod.torch as hvd`."""

from __future__ import annotations

from paceline.bridges.horovod.torch import elastic
from paceline.bridges.horovod.torch.autograd import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from paceline.bridges.horovod.torch.compression import Compression
from paceline.bridges.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from paceline.bridges.horovod.torch.mpi_ops import *  # noqa: F403, every public name of it
from paceline.bridges.horovod.torch.optimizer import DistributedOptimizer
from paceline.bridges.horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "SyncBatchNorm",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]
