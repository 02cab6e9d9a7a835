"""Operations that gradients flow through, with the gradients that Horovod gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.bridges.horovod.common.process_sets import ProcessSet, global_process_set
from paceline.bridges.horovod.torch.compression import Compression
from paceline.bridges.horovod.torch.mpi_ops import (
    Average,
    Sum,
    alltoall_async,
    broadcast_async,
    grouped_allgather_async,
    grouped_allreduce_async,
    grouped_reducescatter_async,
    rank,
    synchronize,
)


class _GroupedAllReduce(torch.autograd.Function):
    """The gradient is reduced in the same way."""

    @staticmethod
    def forward(ctx: Any, name: Any, options: dict[str, Any], *tensors: Tensor) -> Any:
        ctx.options = options
        return tuple(synchronize(grouped_allreduce_async([*tensors], name=name, **options)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dense = [grad.contiguous() for grad in grads]
        return None, None, *_call(_GroupedAllReduce, None, ctx.options, *dense)


class _GroupedAllGather(torch.autograd.Function):
    """Each rank gets the mean of the gradients of its rows."""

    @staticmethod
    def forward(ctx: Any, name: Any, process_set: ProcessSet, *tensors: Tensor) -> Any:
        handle = grouped_allgather_async([*tensors], name, process_set)
        ctx.process_set = process_set
        ctx.rows = handle.operation.wait().rows
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dense, index = [grad.contiguous() for grad in grads], ctx.process_set.rank()
        means = grouped_allreduce(dense, op=Average, process_set=ctx.process_set)
        own = [mean.split(rows)[index] for mean, rows in zip(means, ctx.rows, strict=True)]
        return None, None, *own


class _Broadcast(torch.autograd.Function):
    """The root gets the mean of all gradients, and the others zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root: int, name: Any, process_set: ProcessSet) -> Any:
        ctx.root, ctx.process_set = root, process_set
        return synchronize(broadcast_async(tensor, root, name, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        mean = allreduce(grads[0].contiguous(), op=Average, process_set=ctx.process_set)
        return mean if rank() == ctx.root else mean * 0, None, None, None


class _AllToAll(torch.autograd.Function):
    """Gradients go back to where the rows came from."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: Any, process_set: ProcessSet) -> Any:
        handle = alltoall_async(tensor, splits, name, process_set)
        ctx.process_set, ctx.shape = process_set, tensor.shape
        ctx.received = handle.operation.wait().rows[0]
        result = synchronize(handle)
        if splits is not None:
            ctx.mark_non_differentiable(result[1])
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        back, _ = alltoall(grads[0].contiguous(), ctx.received, process_set=ctx.process_set)
        # rows that no rank was sent have no gradient
        unsent = back.new_zeros(ctx.shape[0] - len(back), *ctx.shape[1:])
        return torch.cat([back, unsent]), None, None, None


class _GroupedReduceScatter(torch.autograd.Function):
    """Gradients are gathered, times the number of ranks for a sum."""

    @staticmethod
    def forward(ctx: Any, name: Any, options: dict[str, Any], *tensors: Tensor) -> Any:
        ctx.options = options
        return tuple(synchronize(grouped_reducescatter_async([*tensors], name, **options)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        options = ctx.options
        factor = options["prescale_factor"] * options["postscale_factor"]
        if options["op"] == Sum:
            factor *= options["process_set"].size()
        scaled = [(grad * factor).contiguous() for grad in grads]
        return None, None, *grouped_allgather(scaled, process_set=options["process_set"])


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce tensors that travel together. Gradients flow through it.

    Args:
        tensors: Tensors of the same shapes and dtypes on all ranks.
        average: Older form of `op`: Average or Sum.
        name: Name by which ranks find each other. Default: the order of operations without names.
        compression: `Compression.none` (default) or `Compression.fp16`.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        prescale_factor: Factor before the reduction. Default: 1.
        postscale_factor: Factor after the reduction. Default: 1.
        process_set: Ranks that take part. Default: all.
    """
    options = {
        "average": average,
        "op": op,
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
        "process_set": process_set,
    }
    return _apply_compressed(_GroupedAllReduce, tensors, name, compression, options)


def allreduce(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    """Reduce a tensor over all ranks. Arguments as in `grouped_allreduce`."""
    return grouped_allreduce([tensor], *args, **options)[0]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Gather tensors along their first dim, in which ranks may differ. Gradients flow through."""
    return [*_call(_GroupedAllGather, name, process_set, *tensors)]


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Gather a tensor along its first dim, in which ranks may differ. Gradients flow through."""
    return grouped_allgather([tensor], name, process_set)[0]


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the values of rank `root_rank`. Gradients flow through it."""
    result: Tensor = _call(_Broadcast, tensor, root_rank, name, process_set)
    return result


def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send each rank some rows of a tensor. See `alltoall_async`. Gradients flow through it."""
    return _call(_AllToAll, tensor, splits, name, process_set)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce tensors, and keep this rank's rows. See `reducescatter_async`."""
    options = {
        "op": op,
        "process_set": process_set,
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
    }
    return _apply_compressed(_GroupedReduceScatter, tensors, name, compression, options)


def reducescatter(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    """Reduce a tensor, and keep this rank's rows. Arguments as in `grouped_reducescatter`."""
    return grouped_reducescatter([tensor], *args, **options)[0]


def _apply_compressed(
    function: Any, tensors: Sequence[Tensor], name: Any, compression: Any, options: Any
) -> list[Tensor]:
    compressed = [compression.compress(tensor) for tensor in tensors]
    reduced = _call(function, name, options, *(tensor for tensor, _ in compressed))
    return [
        compression.decompress(tensor, ctx)
        for tensor, (_, ctx) in zip(reduced, compressed, strict=True)
    ]


def _call(function: Any, *args: Any) -> Any:
    """Call an autograd function; torch has no types for that."""
    return function.apply(*args)
