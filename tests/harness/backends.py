"""Process groups of the backend on threads: over the group of threads, and over shared memory."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.cluster.store import Store
from paceline.comm.backend.issue import GroupMembers
from paceline.comm.backend.process_group import GroupBackend
from paceline.comm.group_protocol import Group
from paceline.comm.shm.shared_group import SharedGroup
from tests.harness.processes import threads
from tests.harness.thread_groups import spawn

PATIENCE = 60.0  # seconds
SIZES = [1, 2, 3]
Body = Callable[[GroupBackend], Any]


def backend(group: Group, *, cores: float = math.inf) -> GroupBackend:
    """A process group on a host with so many cores for each worker."""
    hosts = tuple(f"host{rank}" for rank in range(group.size))
    return GroupBackend(
        group.rank,
        range(group.size),
        lambda: GroupMembers(group, hosts, cores),
        dist.HashStore(),
        pairs=None,
    )


def meet(group: GroupBackend) -> None:
    """Let the ranks of a group in shared memory make it; from then on callers begin operations
    themselves.
    """
    group.barrier().wait()
    end = time.monotonic() + PATIENCE
    while (
        not group._issuer._begins_directly
    ):  # until its thread has noted that nothing is left to it
        assert time.monotonic() < end
        os.sched_yield()


def on_threads(size: int, body: Body) -> list[Any]:
    def run(group: Group) -> Any:
        mine = backend(group)
        try:
            return body(mine)
        finally:
            mine.shutdown()

    return spawn(size, run)


def on_shared_memory(size: int, body: Body, *, cores: float = math.inf) -> list[Any]:
    def run(rank: int, size: int, store: Store) -> Any:
        group = SharedGroup.from_store(store, rank, size, deadline=20)
        mine = backend(group, cores=cores)
        try:
            return body(mine)
        finally:
            mine.shutdown()
            group.close()

    return threads(size, run)


RUNNERS = pytest.mark.parametrize("run", [on_threads, on_shared_memory])


def mine(rank: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Different data on every rank, the same in every run."""
    values = (
        torch.randn(
            shape, generator=torch.Generator().manual_seed(97 * seed + rank), dtype=torch.float64
        )
        * 3
    )
    return torch.complex(values, values + rank).to(dtype) if dtype.is_complex else values.to(dtype)


def reducing(
    op: Any = dist.ReduceOp.SUM, kind: Any = dist.AllreduceOptions, root: int | None = None
) -> Any:
    options = kind()
    options.reduceOp = op
    if root is not None:
        options.rootRank = root
    return options


def rooted(kind: Any, root: int) -> Any:
    options = kind()
    options.rootRank = root
    return options
