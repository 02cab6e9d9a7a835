"""Runs agreed operations on paceline's groups, in the agreed order.

Neighbours in that order that reduce the same dtype in the same way travel as one buffer:

    allreduce.a (3,)   allreduce.b (2, 2)  ->  [a a a b b b b] -> all_reduce -> back to a and b
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import torch
from torch import Tensor

from paceline.bridges.horovod.engine.adasum import reduce_adasum
from paceline.bridges.horovod.engine.controller import Agreed
from paceline.bridges.horovod.engine.requests import OperationRequest
from paceline.comm.group_protocol import Group, Op, UncheckedAllReduce

FUSION_BYTES: Final = 64 << 20  # as Horovod's HOROVOD_FUSION_THRESHOLD has by default
_GROUP_OPS: Final[dict[str, Op]] = {
    "sum": "sum",
    "average": "sum",
    "min": "min",
    "max": "max",
    "product": "product",
}


class ReadyOperation(NamedTuple):
    """An agreed operation with this rank's tensors: zeros if this rank has joined."""

    agreed: Agreed
    tensors: list[Tensor]

    @property
    def request(self) -> OperationRequest:
        """What one of the ranks asked for; all agree on the reduction."""
        return next(iter(self.agreed.requests.values()))


class OperationResult(NamedTuple):
    """Tensors that an operation gives.

    `rows`: for each tensor that comes from several ranks, the number of rows from each of them.
    """

    tensors: list[Tensor]
    rows: Sequence[Sequence[int]] = ()


def fuse_neighbours(operations: Iterable[ReadyOperation]) -> Iterator[list[ReadyOperation]]:
    """Put neighbours together that can travel as one buffer."""
    batch: list[ReadyOperation] = []
    nbytes = 0
    for operation in operations:
        size = sum(x.numel() * x.element_size() for x in operation.tensors)
        if batch and (
            not _can_fuse(batch[0].request, operation.request) or nbytes + size > FUSION_BYTES
        ):
            yield batch
            batch, nbytes = [], 0
        batch.append(operation)
        nbytes += size
    if batch:
        yield batch


def run_batch(group: Group, batch: Sequence[ReadyOperation]) -> list[OperationResult]:
    """Run operations that `fuse_neighbours` put together. Collective in `group`."""
    request = batch[0].request
    kind = request.key.kind
    if kind == "allreduce":
        return _split_results(
            batch, _all_reduce(group, request, [x for o in batch for x in o.tensors])
        )
    (operation,) = batch
    if kind == "allgather":
        gathered = [group.all_gather(x, name=str(request.key)).wait() for x in operation.tensors]
        rows = [[len(part) for part in parts] for parts in gathered]
        return [OperationResult([torch.cat(parts) for parts in gathered], rows)]
    if kind == "broadcast":
        root = operation.agreed.ranks.index(request.root)
        copies = [x.detach().clone() for x in operation.tensors]
        return [OperationResult([group.broadcast(x, root=root).wait() for x in copies])]
    if kind == "alltoall":
        return [_all_to_all(group, operation)]
    if kind == "reducescatter":
        return [OperationResult([_reduce_scatter(group, request, x) for x in operation.tensors])]
    return [OperationResult([])]


def _can_fuse(first: OperationRequest, second: OperationRequest) -> bool:
    def properties(request: OperationRequest) -> tuple[object, ...]:
        return (
            request.key.process_set,
            {*request.dtypes},
            request.op,
            request.prescale,
            request.postscale,
        )

    return (
        first.key.kind == second.key.kind == "allreduce"
        and first.op != "adasum"
        and properties(first) == properties(second)
    )


def _all_reduce(group: Group, request: OperationRequest, tensors: Sequence[Tensor]) -> list[Tensor]:
    if request.op == "adasum":
        scaled = [_scale(x, request.prescale) for x in tensors]
        return [_scale(reduce_adasum(group, x), request.postscale) for x in scaled]
    reduced: list[Tensor] = [*tensors]
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        indices = [index for index, x in enumerate(tensors) if x.dtype == dtype]
        flat = torch.cat([tensors[index].detach().reshape(-1) for index in indices])
        total = _reduce_flat(group, request, flat)
        ends = [*accumulate(tensors[index].numel() for index in indices)]
        for index, end in zip(indices, ends, strict=True):
            x = tensors[index]
            reduced[index] = total[end - x.numel() : end].view(x.shape)
    return reduced


def _reduce_flat(group: Group, request: OperationRequest, flat: Tensor) -> Tensor:
    """Reduce one buffer, with the factors before and after."""
    flat, op = _scale(flat, request.prescale), _GROUP_OPS[request.op]
    if not flat.numel():
        return flat
    # ranks have agreed on the call already
    reduce = group.all_reduce_agreed if isinstance(group, UncheckedAllReduce) else group.all_reduce
    return _finish(request, reduce(flat, op=op, out=flat).wait(), group.size)


def _finish(request: OperationRequest, total: Tensor, size: int) -> Tensor:
    """Apply what comes after a sum: the factor, and the division of an average."""
    total = _scale(total, request.postscale)
    if request.op != "average":
        return total
    rounding = None if total.dtype.is_floating_point else "trunc"
    return torch.div(total, size, rounding_mode=rounding)


def _scale(x: Tensor, factor: float) -> Tensor:
    """Multiply by a factor. Integers are multiplied as float64, and lose their fraction."""
    if factor == 1.0:
        return x
    return x * factor if x.dtype.is_floating_point else (x.double() * factor).to(x.dtype)


def _reduce_scatter(group: Group, request: OperationRequest, x: Tensor) -> Tensor:
    """Reduce whole rows: the first ranks get one more if they can't be divided evenly."""
    base, extra = divmod(x.shape[0], group.size)
    counts = [base + (rank < extra) for rank in range(group.size)]
    scaled, op = _scale(x.detach(), request.prescale).contiguous(), _GROUP_OPS[request.op]
    # the group cuts by elements, not by rows
    if extra:
        total = group.all_reduce(scaled, op=op).wait().split(counts)[group.rank].clone()
    else:
        total = group.reduce_scatter(scaled, op=op).wait()
    return _finish(request, total, group.size).view(counts[group.rank], *x.shape[1:])


def _all_to_all(group: Group, operation: ReadyOperation) -> OperationResult:
    (x,) = operation.tensors
    own = operation.agreed.ranks[group.rank]
    splits = operation.agreed.requests[own].numbers
    received = group.all_to_all(
        [piece.contiguous() for piece in x.detach().split([*splits, x.shape[0] - sum(splits)])[:-1]]
    ).wait()
    return OperationResult([torch.cat(received)], [[len(part) for part in received]])


def _split_results(
    batch: Sequence[ReadyOperation], tensors: Sequence[Tensor]
) -> list[OperationResult]:
    remaining = iter(tensors)
    return [OperationResult([next(remaining) for _ in operation.tensors]) for operation in batch]
