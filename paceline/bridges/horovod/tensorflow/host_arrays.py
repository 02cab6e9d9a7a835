"""Exchanges NumPy arrays by the operations for torch: what TensorFlow's operations run on the host.

    tensor of TensorFlow -- NumPy array -- copy as a tensor of torch -- exchange -- NumPy array

All arrays of a call are submitted before the first is waited for, so that they may be in another
order on each worker: workers find them by their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.bridges.horovod.common.exceptions import HorovodInternalError
from paceline.bridges.horovod.common.process_sets import ProcessSet
from paceline.bridges.horovod.torch import mpi_ops
from paceline.bridges.horovod.torch.mpi_ops import ReductionOp, TorchHandle

Array = NDArray[Any]


class Reduction(NamedTuple):
    """How arrays are reduced: Horovod's options of an all-reduce."""

    op: ReductionOp
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


def reduce_arrays(
    arrays: Sequence[Array], names: Sequence[str | None], reduction: Reduction
) -> list[Array]:
    """Reduce arrays over all workers. Collective."""
    handles = [
        mpi_ops.allreduce_async_(
            copy_array(array),
            name=name,
            op=reduction.op,
            prescale_factor=reduction.prescale,
            postscale_factor=reduction.postscale,
            process_set=reduction.process_set,
        )
        for array, name in zip(arrays, names, strict=True)
    ]
    return _make_arrays(wait_for_all(handles), arrays)


def gather_arrays(
    arrays: Sequence[Array], names: Sequence[str | None], process_set: ProcessSet
) -> list[Array]:
    """Gather the rows of all workers, for each of several arrays. Collective."""
    handles = [
        mpi_ops.allgather_async(copy_array(array), name=name, process_set=process_set)
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
    handles = [
        mpi_ops.broadcast_async_(copy_array(array), root_rank, name=name, process_set=process_set)
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
        The rows for this worker, and their number from each worker (empty without splits).
    """
    numbers = None if splits is None else copy_array(splits)
    handle = mpi_ops.alltoall_async(copy_array(array), numbers, name=name, process_set=process_set)
    answer = mpi_ops.synchronize(handle)
    rows, received = (answer, np.zeros(0, np.int32)) if splits is None else answer
    return make_array(rows, np.asarray(array).dtype), np.asarray(received)


def wait_for_all(handles: Iterable[TorchHandle]) -> list[torch.Tensor]:
    """Wait until all operations have ended; raise the first error after that."""
    results, errors = [], []
    for handle in handles:
        try:
            results.append(mpi_ops.synchronize(handle))
        except HorovodInternalError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results


def _make_arrays(results: Sequence[torch.Tensor], arrays: Sequence[Array]) -> list[Array]:
    return [
        make_array(tensor, np.asarray(array).dtype)
        for tensor, array in zip(results, arrays, strict=True)
    ]
