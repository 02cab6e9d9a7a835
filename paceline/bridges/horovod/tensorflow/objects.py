"""Objects of Python, and meetings, of all workers."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch

from paceline.bridges.horovod.common.basics import PROCESS
from paceline.bridges.horovod.common.process_sets import ProcessSet, global_process_set
from paceline.bridges.horovod.tensorflow.host_arrays import find_set, gather_arrays
from paceline.errors import UsageError


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gather an object that can be pickled from each worker, in order of ranks. Collective."""
    body = np.frombuffer(pickle.dumps(obj), dtype=np.uint8)
    names = [name and f"{name}.size", name and f"{name}.body"]
    sizes, bodies = gather_arrays([np.array([body.size]), body], names, process_set)
    ends = np.cumsum(sizes)
    return [
        pickle.loads(bodies[end - size : end].tobytes())
        for size, end in zip(sizes, ends, strict=True)
    ]


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of the worker `root_rank` on all workers. Collective.

    The object of that worker has to be one that can be pickled.
    """
    ranks = PROCESS.engine.process_sets[find_set(process_set)]
    if root_rank not in ranks:
        raise UsageError(
            f"root_rank={root_rank} is no rank of the workers that take part: "
            f"{', '.join(map(str, ranks))}"
        )
    own = pickle.dumps(obj) if PROCESS.engine.rank == root_rank else b""
    (body,) = gather_arrays([np.frombuffer(own, dtype=np.uint8)], [name], process_set)
    return pickle.loads(body.tobytes())


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all workers have called this. Collective."""
    PROCESS.engine.submit("barrier", process_set=find_set(process_set)).wait()


def join() -> int:
    """Say that this worker has no more data, and wait until all workers have said so.

    Until then it takes part in sums and averages of the others with zeros.

    Returns:
        The rank that joined last.
    """
    (last,) = PROCESS.engine.submit("join").wait().tensors
    assert isinstance(last, torch.Tensor)
    return int(last)
