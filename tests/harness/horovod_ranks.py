"""Ranks that use Horovod's API: forks of the process of the tests, as if by torchrun."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import paceline.bridges.horovod.torch as hvd
from tests.harness.jobs import free_port
from tests.harness.processes import fork

T = TypeVar("T")


def run_ranks(size: int, body: Callable[[int], T], *, deadline: float = 60.0) -> list[T]:
    """Results of `body(rank)` on `size` ranks, after `hvd.init` on each, in rank order."""
    port = free_port()

    def run(rank: int, size: int, store: Any) -> bytes:
        place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PACELINE_DEADLINE": deadline}
        os.environ.update({name: str(value) for name, value in (place | meeting).items()})
        hvd.init()
        try:
            # plain pickle, as tensors that multiprocessing sends end with this process
            result = pickle.dumps(body(rank))
            hvd.barrier()
            return result
        finally:
            hvd.shutdown()
            assert not [t for t in threading.enumerate() if t.name == "paceline horovod"]

    return [pickle.loads(result) for result in fork(size, run)]
