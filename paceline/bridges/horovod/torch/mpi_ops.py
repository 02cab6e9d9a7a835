"""Horovod's operations on torch tensors: each with a form that returns a handle.

    allreduce(x)    allreduce_(x)    allreduce_async(x)    allreduce_async_(x)
                    in place         a handle, for `poll` and `synchronize`

Tensors on GPUs are copied to the host, and back. The gradients of operations are in `autograd.py`.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.bridges.horovod.common.basics import (
    PROCESS,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from paceline.bridges.horovod.common.exceptions import HorovodInternalError
from paceline.bridges.horovod.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from paceline.bridges.horovod.engine.engine import OperationHandle
from paceline.bridges.horovod.engine.execution import OperationResult

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather_async",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall_async",
    "barrier",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather_async",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]


class ReductionOp(enum.IntEnum):
    """How tensors of several ranks are combined."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


Average, Sum, Adasum, Min, Max, Product = ReductionOp

# What Horovod reduces, and what it moves only.
_REDUCED_DTYPES = (
    *(torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
_MOVED_DTYPES = (*_REDUCED_DTYPES, torch.int16, torch.bool)


class TorchHandle:
    """Handle of an operation under way, for `poll` and `synchronize`.

    Args:
        operation: The handle of the engine.
        pick: Makes what `synchronize` returns of the result.
    """

    def __init__(self, operation: OperationHandle, pick: Callable[[OperationResult], Any]) -> None:
        self.operation, self._pick = operation, pick

    def wait(self) -> Any:
        """Wait for the operation, and return its result."""
        return self._pick(self.operation.wait())


def choose_op(op: Any, average: bool | None) -> ReductionOp:
    """Choose the reduction from `op` and the older argument `average`. Default: Average."""
    if average is not None:
        if op is not None:
            raise ValueError(
                "The op parameter supersedes average. Please provide only one of them."
            )
        warnings.warn(
            "Parameter `average` has been replaced with `op`: op=Average or op=Sum",
            DeprecationWarning,
            stacklevel=3,
        )
        return Average if average else Sum
    return Average if op is None else ReductionOp(op)


def submit_tensors(
    kind: str,
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor] | None = None,
    *,
    name: str | None,
    process_set: ProcessSet,
    op: ReductionOp | None = None,
    pick: Callable[[OperationResult], Any] = lambda result: result.tensors[0],
    **options: Any,
) -> TorchHandle:
    """Submit an operation to the engine.

    Args:
        kind: As in `OperationEngine.submit`; so are `name` and the options.
        tensors: One tensor, or those of a grouped operation.
        outputs: Tensors to fill, such as `tensors` themselves. Default: new ones.
        op: The reduction, if there is one.
        pick: Makes what `synchronize` returns of the result. Default: its first tensor.

    Raises:
        ValueError: A tensor isn't contiguous, or has a dtype that can't be exchanged; or this
            process isn't in the process set, or the set was not added.
    """
    for tensor in tensors:
        if tensor.dtype not in (_MOVED_DTYPES if op is None else _REDUCED_DTYPES):
            raise ValueError(f"Tensor type {tensor.type()} is not supported.")
        if not tensor.is_contiguous():
            raise ValueError("Tensor is required to be contiguous.")
    engine = PROCESS.engine
    if process_set.process_set_id is None or not process_set.included():
        raise ValueError(f"{process_set} was not added, or doesn't have this rank, {engine.rank}")
    devices = [tensor.device for tensor in tensors]

    def finish(result: OperationResult) -> OperationResult:
        if outputs is None:
            moved = [x.to(device) for x, device in zip(result.tensors, devices, strict=True)]
            # a tensor of its own, which doesn't keep the buffer of others alive
            return result._replace(tensors=[x.clone() if x._is_view() else x for x in moved])
        for output, x in zip(outputs, result.tensors, strict=True):
            output.detach().copy_(x)
        return result._replace(tensors=[*outputs])

    operation = engine.submit(
        kind,
        [tensor.detach().cpu() for tensor in tensors],
        name=name,
        process_set=process_set.process_set_id,
        op="" if op is None else op.name.lower(),
        finish=finish,
        **options,
    )
    return TorchHandle(operation, pick)


def pick_all(result: OperationResult) -> list[Tensor]:
    """Give all tensors of a grouped operation."""
    return result.tensors


def _all_reduce(
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor] | None,
    op: ReductionOp,
    scales: tuple[float, float],
    *,
    name: str | None,
    process_set: ProcessSet,
    pick: Callable[[OperationResult], Any] = lambda result: result.tensors[0],
) -> TorchHandle:
    if op == Adasum:
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        if size() & (size() - 1):
            raise NotImplementedError(
                "Running Adasum with non-power of 2 ranks is not supported yet."
            )
    return submit_tensors(
        "allreduce",
        tensors,
        outputs,
        name=name,
        process_set=process_set,
        op=op,
        pick=pick,
        prescale=scales[0],
        postscale=scales[1],
    )


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> TorchHandle:
    """Begin to reduce a tensor over all ranks. The tensor isn't changed.

    Args:
        tensor: Tensor of the same shape and dtype on all ranks.
        average: Older form of `op`: Average or Sum.
        name: Name by which ranks find each other. Default: the order of operations without names.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        prescale_factor: Factor before the reduction. Default: 1.
        postscale_factor: Factor after the reduction. Default: 1.
        process_set: Ranks that take part. Default: all.

    Returns:
        A handle for `poll` and `synchronize`.
    """
    scales = prescale_factor, postscale_factor
    op = choose_op(op, average)
    return _all_reduce([tensor], None, op, scales, name=name, process_set=process_set)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> TorchHandle:
    """Begin to reduce a tensor over all ranks, in place. See `allreduce_async`."""
    scales = prescale_factor, postscale_factor
    op = choose_op(op, average)
    return _all_reduce([tensor], [tensor], op, scales, name=name, process_set=process_set)


def allreduce_(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    """Reduce a tensor over all ranks, in place. See `allreduce_async`."""
    return synchronize(allreduce_async_(tensor, *args, **options))  # type: ignore[no-any-return]


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> TorchHandle:
    """Begin to reduce tensors that travel together. See `allreduce_async`."""
    scales = prescale_factor, postscale_factor
    op = choose_op(op, average)
    return _all_reduce(tensors, None, op, scales, name=name, process_set=process_set, pick=pick_all)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> TorchHandle:
    """Begin to reduce tensors that travel together, in place. See `allreduce_async`."""
    scales = prescale_factor, postscale_factor
    op = choose_op(op, average)
    return _all_reduce(
        tensors, tensors, op, scales, name=name, process_set=process_set, pick=pick_all
    )


def grouped_allreduce_(tensors: Sequence[Tensor], *args: Any, **options: Any) -> list[Tensor]:
    """Reduce tensors that travel together, in place. See `allreduce_async`."""
    return synchronize(grouped_allreduce_async_(tensors, *args, **options))  # type: ignore[no-any-return]


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: Any, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Begin to reduce a sparse tensor: all ranks gather the indices and values of all.

    Returns:
        A function that waits for the result, and returns it. `synchronize` calls it too.
    """
    op = choose_op(op, None)
    if op not in (Average, Sum):
        raise ValueError(f"a sparse tensor has no reduction {op.name}; use Average or Sum")
    tensor = tensor.coalesce()
    names = [None if name is None else f"{name}.{part}" for part in ("indices", "values")]
    # ranks hold different numbers of entries, so that entries have to be the first dim
    indices = allgather_async(tensor.indices().t().contiguous(), names[0], process_set)
    values = allgather_async(tensor.values().contiguous(), names[1], process_set)

    def wait() -> Tensor:
        found, entries = synchronize(indices), synchronize(values)
        count = process_set.size() if op == Average else 1
        return torch.sparse_coo_tensor(found.t(), entries / count, tensor.shape).coalesce()

    return wait


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> TorchHandle:
    """Begin to gather tensors along their first dim, in which they may differ."""
    return submit_tensors("allgather", [tensor], name=name, process_set=process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> TorchHandle:
    """Begin to gather several tensors. See `allgather_async`."""
    return submit_tensors("allgather", tensors, name=name, process_set=process_set, pick=pick_all)


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> TorchHandle:
    """Begin to give all ranks the values of rank `root_rank`. The tensor isn't changed."""
    return submit_tensors("broadcast", [tensor], name=name, process_set=process_set, root=root_rank)


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> TorchHandle:
    """Begin to give all ranks the values of rank `root_rank`, in place."""
    return submit_tensors(
        "broadcast", [tensor], [tensor], name=name, process_set=process_set, root=root_rank
    )


def broadcast_(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    """Give all ranks the values of rank `root_rank`, in place. See `broadcast_async_`."""
    return synchronize(broadcast_async_(tensor, *args, **options))  # type: ignore[no-any-return]


def alltoall_async(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> TorchHandle:
    """Begin to send each rank some rows of a tensor.

    Args:
        tensor: Tensor whose first dim is divided.
        splits: Number of rows for each rank, int32. Default: equal parts.
        name: See `allreduce_async`; so for `process_set`.

    Returns:
        A handle. `synchronize` returns the rows that came here; with `splits` also how many came
        from each rank.

    Raises:
        ValueError: There are fewer rows than `splits` says, or `splits` isn't of int32, or no
            equal parts are possible.
    """
    count = process_set.size() or 1
    rows = tensor.shape[0] if tensor.dim() else 0
    if splits is None:
        if rows % count:
            raise ValueError(
                f"alltoall of {rows} rows among {count} ranks: give splits if the first dimension "
                "can't be divided evenly"
            )
        numbers = [rows // count] * count
    else:
        splits = splits if isinstance(splits, Tensor) else torch.tensor(splits, dtype=torch.int32)
        if splits.dtype != torch.int32:
            raise ValueError(
                f"alltoall expects splits to contain 32-bit integers, not {splits.dtype}"
            )
        numbers = splits.tolist()
        if len(numbers) != count or sum(numbers) > rows or min(numbers) < 0:
            raise ValueError(
                f"alltoall with splits={numbers}: that has to be {count} numbers whose sum is at "
                f"most {rows}, the first dimension"
            )

    def pick(result: OperationResult) -> Any:
        if splits is None:
            return result.tensors[0]
        received = torch.tensor(result.rows[0], dtype=torch.int32, device=splits.device)
        return result.tensors[0], received

    return submit_tensors(
        "alltoall", [tensor], name=name, process_set=process_set, numbers=numbers, pick=pick
    )


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> TorchHandle:
    """Begin to reduce a tensor, and give each rank some of the rows of the result.

    The first ranks get one row more if rows can't be divided evenly. Arguments as in
    `allreduce_async`; `op` is Average (default) or Sum.
    """
    return submit_tensors(
        "reducescatter",
        [tensor],
        name=name,
        process_set=process_set,
        op=_check_scatter_op(op),
        prescale=prescale_factor,
        postscale=postscale_factor,
    )


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> TorchHandle:
    """Begin to reduce and scatter several tensors. See `reducescatter_async`."""
    return submit_tensors(
        "reducescatter",
        tensors,
        name=name,
        process_set=process_set,
        op=_check_scatter_op(op),
        pick=pick_all,
        prescale=prescale_factor,
        postscale=postscale_factor,
    )


def _check_scatter_op(op: Any) -> ReductionOp:
    chosen = choose_op(op, None)
    if chosen not in (Average, Sum):
        raise NotImplementedError(
            f"reducescatter has no reduction {chosen.name}; use Average or Sum"
        )
    return chosen


def poll(handle: TorchHandle) -> bool:
    """Whether `synchronize` would return at once."""
    return handle.operation.done()


def synchronize(handle: Any) -> Any:
    """Wait for an operation, and return its result.

    Raises:
        HorovodInternalError: The operation has failed. It has failed on all ranks then.
    """
    return handle.wait() if isinstance(handle, TorchHandle) else handle()


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until all ranks have said so.

    Until then this rank takes part in the others' allreduces, with zeros.

    Args:
        device: Without effect, as in Horovod on the CPU: zeros are made on the host.

    Returns:
        The rank that joined last.
    """
    return int(PROCESS.engine.submit("join", name="join").wait().tensors[0])


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the process set have come here."""
    submit_tensors("barrier", [], name=None, process_set=process_set).operation.wait()
