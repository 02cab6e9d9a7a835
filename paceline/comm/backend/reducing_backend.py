"""The reductions that torch.distributed asks of a process group."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.backend.base import BackendBase, only_tensor, root_rank
from paceline.comm.backend.recurring import LEAST
from paceline.comm.backend.work import BackendWork, CompositeWork, GlooResult
from paceline.comm.group_protocol import Group, MovesMemory, Op, Work, WritesResults
from paceline.errors import UsageError

REDUCTIONS: dict[Any, Op] = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
}
Fold = Callable[[list[Tensor]], Tensor]  # reduces the tensors of all ranks, in rank order
BITWISE: dict[Any, Fold] = {
    dist.ReduceOp.BAND: partial(functools.reduce, torch.bitwise_and),
    dist.ReduceOp.BOR: partial(functools.reduce, torch.bitwise_or),
    dist.ReduceOp.BXOR: partial(functools.reduce, torch.bitwise_xor),
}


class ReducingBackend(BackendBase):
    """The reductions of a process group of torch.distributed."""

    # torch calls one of the overloads
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> BackendWork:  # type: ignore[override]
        """Reduce the only tensor of a list, in place."""
        x = only_tensor(tensors, "all_reduce")
        if x.is_sparse:
            return self._wrap_work(
                GlooResult(self._pairs.allreduce([x], opts), [x]), None, opts, [x]
            )
        op = translate_reduction(opts, x)
        if callable(op) or x.numel() * x.element_size() < LEAST:
            return self._all_reduce([x], opts, [x])
        # The caller's frame tells whether torch's engine calls, or a script.
        may_move, values = self._recurring.may_move(x, sys._getframe(1)), real_view(x)

        def call(group: Group) -> Work[Any]:
            if isinstance(group, MovesMemory):
                return group.all_reduce_moving(values, op=op, may_move=may_move)
            return group.all_reduce(values, op=op, out=values)

        return self._begin_operation(call, None, opts, [x])

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> BackendWork:
        """Reduce several tensors in place."""
        return self._all_reduce(tensors, opts, tensors)

    def _all_reduce(self, tensors: Sequence[Tensor], opts: Any, outputs: Any) -> BackendWork:
        op = translate_reduction(opts, *tensors)
        if callable(op):
            return self._reduce_by_gathering(tensors, op, opts, outputs)
        if len(tensors) == 1:
            x = real_view(tensors[0])
            return self._begin_operation(
                lambda group: group.all_reduce(x, op=op, out=x), None, opts, outputs
            )

        def call(group: Group) -> Work[Any]:
            return CompositeWork(
                [group.all_reduce(real_view(x), op=op, out=real_view(x)) for x in tensors]
            )

        return self._begin_operation(call, None, opts, outputs)

    def _reduce_by_gathering(
        self, tensors: Sequence[Tensor], fold: Fold, opts: Any, outputs: Any
    ) -> BackendWork:
        """Reduce by an all-gather, for operations that groups don't have."""

        def finish(gathered: list[list[Tensor]]) -> None:
            for x, parts in zip(tensors, gathered, strict=True):
                x.copy_(fold(parts))

        return self._begin_operation(
            lambda group: CompositeWork([group.all_gather(x) for x in tensors]),
            finish,
            opts,
            outputs,
        )

    # torch calls one of the overloads
    def reduce(self, tensors: list[Tensor], opts: Any = None) -> BackendWork:  # type: ignore[override]
        """Reduce to the root rank, in place there. Tensors of other ranks don't change."""
        x, root = only_tensor(tensors, "reduce"), root_rank(opts)
        op = translate_reduction(opts, x)
        if not 0 <= root < self._size:
            raise UsageError(f"reduce: root {root} is not one of the ranks 0 to {self._size - 1}")
        if callable(op):
            held = x if self._rank == root else x.clone()
            return self._reduce_by_gathering([held], op, opts, tensors)
        # Groups have no reduce: all ranks reduce, and all but the root drop the result.
        out = (
            real_view(x)
            if self._rank == root
            else torch.empty_like(real_view(x), memory_format=torch.contiguous_format)
        )
        return self._begin_operation(
            lambda group: group.all_reduce(real_view(x), op=op, out=out), None, opts, tensors
        )

    # torch calls one of the overloads
    def reduce_scatter(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> BackendWork:
        """Reduce a list of tensors, one for each rank, and keep this rank's. Sizes may differ."""
        out, parts = only_tensor(outputs, "reduce_scatter"), inputs[0]
        if len(parts) != self._size:
            raise UsageError(
                f"reduce_scatter: {len(parts)} tensors for {self._size} ranks; "
                "give one for each rank"
            )
        joined = torch.cat([part.reshape(-1) for part in parts])
        if all(part.numel() == parts[0].numel() for part in parts):
            return self._reduce_scatter(out, joined, opts, outputs)
        # Pieces of a group's reduce-scatter are even: with other sizes, all-reduce and cut.
        op = translate_reduction(opts, joined)
        if callable(op):
            raise UsageError(
                "reduce_scatter: bitwise operations and averages of "
                "integers need tensors of one size"
            )
        own = parts[self._rank]
        if out.numel() != own.numel() or out.dtype != joined.dtype:
            sizes = f"{out.dtype} {list(out.shape)} of {joined.dtype} {list(own.shape)}"
            raise UsageError(
                f"reduce_scatter: rank {self._rank} can't get {sizes}: its output has the size and "
                "dtype of its own input"
            )
        start = sum(part.numel() for part in parts[: self._rank])
        stop = start + out.numel()
        return self._begin_operation(
            lambda group: group.all_reduce(real_view(joined), op=op, out=real_view(joined)),
            lambda _: out.copy_(joined[start:stop].view(out.shape)),
            opts,
            outputs,
        )

    def reduce_scatter_single(
        self, output: Tensor, source: Tensor, opts: Any = None
    ) -> BackendWork:
        """Reduce a tensor that holds the parts of all ranks in order, and keep this rank's part."""
        return self._reduce_scatter(output, source, opts, [output])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> BackendWork:
        """Reduce several tensors as `reduce_scatter_single` does."""
        return self._join_works(
            [
                self._reduce_scatter(out, x, opts, [out])
                for out, x in zip(outputs, inputs, strict=True)
            ],
            opts,
            outputs,
        )

    # name before torch 2.13
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def _reduce_scatter(self, out: Tensor, x: Tensor, opts: Any, outputs: Any) -> BackendWork:
        op = translate_reduction(opts, x)
        if out.numel() * self._size != x.numel() or out.dtype != x.dtype:
            sizes = f"{out.dtype} {list(out.shape)} of {x.dtype} {list(x.shape)}"
            raise UsageError(
                f"reduce_scatter over {self._size} ranks can't give {sizes}: "
                "its output has that part of the input"
            )
        if callable(op):
            held, rank = x.clone(), self._rank

            def take(_: Any) -> None:
                out.copy_(held.view(self._size, -1)[rank].view(out.shape))

            return self._join_works(
                [self._reduce_by_gathering([held], op, opts, outputs)], opts, outputs, take
            )
        into = real_view(out)

        def call(group: Group) -> Work[Any]:
            if isinstance(group, WritesResults) and into.is_contiguous():
                return group.reduce_scatter_into(real_view(x), into.view(-1), op=op)
            return group.reduce_scatter(real_view(x), op=op)

        def finish(piece: Tensor) -> None:
            if piece.data_ptr() != into.data_ptr():
                into.copy_(piece.view(into.shape))

        return self._begin_operation(call, finish, opts, outputs)


def translate_reduction(opts: Any, *tensors: Tensor) -> Op | Fold:
    """Translate torch's reduction: to the name of one that groups have, or to a function.

    The function reduces the tensors of all ranks.
    """
    op = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
    # Groups don't average integers, as a mean of them is not exact. NCCL does.
    if op == dist.ReduceOp.AVG and all(_is_integer(x) for x in tensors):
        return _average_integers
    # A `ReduceOp` of torch equals the constants of the tables, but a lookup would not find it.
    for torch_op, name in REDUCTIONS.items():
        if op == torch_op:
            return name
    for torch_op, function in BITWISE.items():
        if op == torch_op:
            return function
    raise UsageError(
        f"{op} is not a reduction of the backend paceline; "
        f"there are {', '.join(map(str, (*REDUCTIONS, *BITWISE)))}"
    )


def _is_integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _average_integers(parts: list[Tensor]) -> Tensor:
    """Divide the sum as NCCL does: rounded towards zero, in the dtype of the parts."""
    return functools.reduce(torch.add, parts).div(len(parts), rounding_mode="trunc")


def real_view(x: Tensor) -> Tensor:
    """View complex numbers as pairs of real ones, which add up part by part."""
    return torch.view_as_real(x) if x.is_complex() else x
