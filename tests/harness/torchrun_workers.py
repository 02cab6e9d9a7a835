"""Forked workers with the variables that torchrun sets, for libraries that look for them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from paceline.cluster.store import Store
from tests.harness.jobs import FOREIGN, free_port
from tests.harness.processes import fork

T = TypeVar("T")


def run_workers(
    size: int, body: Callable[[], T], folder: Path, *, timeout: float = 120.0, **environ: str
) -> list[T]:
    """The results of `body` in forked workers, by rank; each of them works in `folder`.

    A single worker is started alone, without any variables.
    """
    port = str(free_port())

    def work(rank: int, size: int, store: Store) -> T:
        for name in [name for name in os.environ if name.startswith(FOREIGN)]:
            del os.environ[name]
        places: dict[str, Any] = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "GROUP_RANK": 0,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        if size > 1:
            os.environ.update({name: str(value) for name, value in places.items()})
        os.environ.update({"OMP_NUM_THREADS": "1", **environ})
        os.chdir(folder)
        torch.manual_seed(100 + rank)  # workers differ in all that nobody makes equal
        return body()

    return fork(size, work, timeout=timeout)
