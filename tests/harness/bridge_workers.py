"""Workers of tests of bridges: forked with the foreign library in memory, as torchrun would start
them.
"""

from __future__ import annotations

import atexit
import importlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from paceline.cluster.store import Store
from tests.harness import processes
from tests.harness.jobs import free_port

T = TypeVar("T")


def fork_workers(
    size: int, folder: Path, body: Callable[[int], T], *imports: str, **options: Any
) -> list[T]:
    """The results of `body(rank)` in workers that find each other as those of torchrun do.

    Args:
        size: Number of workers.
        folder: Their working folder.
        body: What each worker does.
        imports: Modules that are loaded before the processes are forked.
        options: As for `processes.fork`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries that others maintain
        for name in imports:
            importlib.import_module(name)
    port = free_port()

    def run(rank: int, _: int, __: Store) -> T:
        warnings.simplefilter("ignore")
        os.chdir(folder)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        meeting = {"GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in {**place, **meeting}.items()})
        torch.manual_seed(0)
        atexit._clear()  # of the process that was forked
        answer = body(rank)
        atexit._run_exitfuncs()  # as multiprocessing doesn't; they close the run
        return answer

    return processes.fork(size, run, **options)
