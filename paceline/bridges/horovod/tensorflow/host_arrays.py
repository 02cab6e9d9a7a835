"""Exchanges NumPy arrays by the engine: what operations of TensorFlow run on the host.

    tensor of TensorFlow -- NumPy array -- copy as a tensor of torch -- exchange -- NumPy array

All arrays of a call are submitted before the first is waited for, so that they may be in another
order on each worker: workers find them by their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.bridges.horovod.common.basics import PROCESS
from paceline.bridges.horovod.common.exceptions import HorovodInternalError
from paceline.bridges.horovod.common.process_sets import ProcessSet
from paceline.bridges.horovod.engine.engine import OperationHandle
from paceline.bridges.horovod.engine.execution import OperationResult
from paceline.errors import UsageError

Array = NDArray[Any]

# Reductions, as the engine calls them.
Average: Final = "average"
Sum: Final = "sum"
Adasum: Final = "adasum"
Min: Final = "min"
Max: Final = "max"
Product: Final = "product"


class Reduction(NamedTuple):
    """How arrays are reduced: Horovod's options of an all-reduce."""

    op: str
    prescale: float
    postscale: float
    process_set: ProcessSet


def copy_array(array: Any) -> torch.Tensor:
    """Copy an array to a tensor of torch. NumPy has no bfloat16, so torch is given its bits."""
    own = np.array(array, copy=True, order="C")
    if own.dtype.name == "bfloat16":
        return torch.from_numpy(own.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(own)


def make_array(tensor: torch.Tensor, dtype: np.dtype[Any]) -> Array:
    """Make an array of a tensor, of the dtype that the sent array had."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(dtype)
    return tensor.numpy()


def find_set(process_set: ProcessSet) -> int:
    """Find the id of a process set.

    Raises `UsageError` if it wasn't added, or if this worker isn't in it.
    """
    number = process_set.process_set_id
    if number is None:
        raise UsageError(f"{process_set} was not added: give it to hvd.add_process_set first")
    if not process_set.included():
        raise UsageError(f"rank {PROCESS.engine.rank} is not in {process_set}, and can't use it")
    return number


def reduce_arrays(
    arrays: Sequence[Array], names: Sequence[str | None], reduction: Reduction
) -> list[Array]:
    """Reduce arrays over all workers. Collective."""
    number, engine = find_set(reduction.process_set), PROCESS.engine
    handles = [
        engine.submit(
            "allreduce",
            [copy_array(array)],
            name=name,
            process_set=number,
            op=reduction.op,
            prescale=reduction.prescale,
            postscale=reduction.postscale,
        )
        for array, name in zip(arrays, names, strict=True)
    ]
    return _make_arrays(wait_for_all(handles), arrays)


def gather_arrays(
    arrays: Sequence[Array], names: Sequence[str | None], process_set: ProcessSet
) -> list[Array]:
    """Gather the rows of all workers, for each of several arrays. Collective."""
    number, engine = find_set(process_set), PROCESS.engine
    handles = [
        engine.submit("allgather", [copy_array(array)], name=name, process_set=number)
        for array, name in zip(arrays, names, strict=True)
    ]
    return _make_arrays(wait_for_all(handles), arrays)


def broadcast_arrays(
    arrays: Sequence[Array],
    names: Sequence[str | None],
    root_rank: int,
    process_set: ProcessSet,
) -> list[Array]:
    """Copy one worker's arrays to all. Collective."""
    number, engine = find_set(process_set), PROCESS.engine
    ranks = engine.process_sets[number]
    if root_rank not in ranks:
        raise UsageError(
            f"root_rank={root_rank} is no rank of the workers that take part: "
            f"{', '.join(map(str, ranks))}"
        )
    handles = [
        engine.submit(
            "broadcast", [copy_array(array)], name=name, process_set=number, root=root_rank
        )
        for array, name in zip(arrays, names, strict=True)
    ]
    return _make_arrays(wait_for_all(handles), arrays)


def exchange_rows(
    array: Array, splits: Array | None, name: str | None, process_set: ProcessSet
) -> tuple[Array, Array]:
    """Send each worker its rows of an array. Collective.

    Args:
        array: The rows, first those for rank 0.
        splits: Number of rows for each worker. None: as many for each.
        name: Name of the exchange.
        process_set: Workers that take part.

    Returns:
        The rows for this worker, and their number from each worker.
    """
    number, engine = find_set(process_set), PROCESS.engine
    count = len(engine.process_sets[number])
    if splits is None and len(array) % count:
        raise UsageError(
            f"alltoall got {len(array)} rows for {count} workers, which can't have as many each: "
            "give splits"
        )
    numbers = [len(array) // count] * count if splits is None else [int(rows) for rows in splits]
    if len(numbers) != count or min(numbers) < 0 or sum(numbers) != len(array):
        raise UsageError(
            f"splits={numbers} don't divide {len(array)} rows among {count} workers: give one "
            "number of rows for each worker"
        )
    handle = engine.submit(
        "alltoall", [copy_array(array)], name=name, process_set=number, numbers=numbers
    )
    ((rows,), received) = handle.wait()
    assert received is not None
    return make_array(rows, np.asarray(array).dtype), received.to(torch.int32).numpy()


def wait_for_all(handles: Iterable[OperationHandle]) -> list[OperationResult]:
    """Wait until all operations have ended; raise the first error after that."""
    results, errors = [], []
    for handle in handles:
        try:
            results.append(handle.wait())
        except HorovodInternalError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results


def _make_arrays(results: Sequence[OperationResult], arrays: Sequence[Array]) -> list[Array]:
    return [
        make_array(tensor, np.asarray(array).dtype)
        for ((tensor,), _), array in zip(results, arrays, strict=True)
    ]
