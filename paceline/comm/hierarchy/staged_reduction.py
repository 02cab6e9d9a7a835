"""The three stages of an all-reduce over hosts, chunk by chunk.

stage 1   all ranks of a host    sum their parts of the chunk
stage 2   the hosts' leaders     all-reduce the sums of their hosts
stage 3   all ranks of a host    get the result from their leader, and divide a mean
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import torch
from torch import Tensor

from paceline.comm import reduction_rules
from paceline.comm.collectives import TAG, all_reduce_by_schedule_agreed
from paceline.comm.group_protocol import Group, Op, UncheckedAllReduce, Work
from paceline.comm.hierarchy.chunks import cut_chunks
from paceline.comm.hierarchy.staged_executor import Flow, Steps
from paceline.comm.schedule import Schedule
from paceline.comm.shm.shared_group import SharedGroup
from paceline.comm.shm.shared_segment import empty_on_cpu
from paceline.comm.shm.window_messages import is_plain
from paceline.trace import Trace

CROSSINGS = 1 << 12  # exchanges between leaders that may be under way at a time
# Starts the sum of one tensor from each rank of a host: (own part, where the sum goes, operation).
HostSum = Callable[[Tensor, Tensor, Op], Work[Tensor]]


class ReductionStages:
    """The groups that a chunk passes.

    Args:
        inner: The workers of this host, for sums.
        outer: The leaders. None on workers that don't lead.
        handout: The workers of this host, for results. None if there is only one.
        size: Number of all workers.
        trace: Gets a span for each stage.
    """

    def __init__(
        self, inner: Group, outer: Group | None, handout: Group | None, size: int, trace: Trace
    ) -> None:
        self._inner, self._outer, self._handout_group = inner, outer, handout
        self._size, self._trace = size, trace
        self._crossings = 0  # gives exchanges under way at the same time tags of their own

    @property
    def moves_memory(self) -> bool:
        """Whether sums inside the host can move the memory of a tensor."""
        return isinstance(self._inner, SharedGroup)

    def reduce_chunk(
        self,
        own: Tensor,
        out: Tensor,
        how: tuple[torch.dtype, Op, Op],
        inside: HostSum,
        across: Schedule | None,
    ) -> Steps:
        """Take one chunk through the stages: from this rank's part `own` to the result in `out`.

        `how`: the dtype that sums are held in (and travel in), the operation, and the operation
        without the division of a mean.
        """
        held, op, added = how
        total = out if held == out.dtype else torch.empty(out.numel(), dtype=held)
        # Stage 1: sum inside the host.
        if self._inner.size > 1:
            with self._trace.measure_span("sum", "within"):
                inside(total.copy_(own) if own.dtype != total.dtype else own, total, added).wait()
        elif own.data_ptr() != total.data_ptr():
            total.copy_(own)
        # Stage 2: leaders exchange. What follows the yield runs in the next thread.
        begun, crossing = time.perf_counter_ns(), self._exchange_leaders(total, added, across)
        yield crossing
        if crossing is not None:
            self._trace.record_span("all-reduce", "between", begun, time.perf_counter_ns())
        # Stage 3: the leader hands the result out. Each rank divides a mean and rounds by itself.
        if self._handout_group is not None:
            with self._trace.measure_span("hand out", "within"):
                self._handout_group.broadcast(total, root=0).wait()
        reduction_rules.finish_reduction(op, total, self._size)
        if total is not out:
            out.copy_(total)

    def sum_in_host(self, own: Tensor, total: Tensor, op: Op) -> Work[Tensor]:
        """Sum the parts of this host's ranks into `total`, on each of them."""
        return self._inner.all_reduce(own, op=op, out=total)

    def sum_in_place(
        self, to_move: Tensor | None, own: Tensor, total: Tensor, op: Op
    ) -> Work[Tensor]:
        """Sum the parts of this host's ranks in place.

        `to_move`: the tensor whose memory moves first, and which `own` is the first chunk of; None
        if nothing may move.
        """
        assert isinstance(self._inner, SharedGroup)
        if own.data_ptr() != total.data_ptr():
            total.copy_(own)
        return self._inner.all_reduce_moving(
            total, op=op, may_move=to_move is not None, whole=to_move
        )

    def _exchange_leaders(
        self, chunk: Tensor, op: Op, across: Schedule | None
    ) -> Work[Tensor] | None:
        """Start the leaders' exchange of a chunk; None on workers that don't lead."""
        if self._outer is None:
            return None
        if across is not None:
            # Several chunks are under way at a time, so each has tags of its own.
            self._crossings = (self._crossings + 1) % CROSSINGS
            tag = TAG + self._crossings * len(across.rounds)
            return all_reduce_by_schedule_agreed(self._outer, chunk, across, op, out=chunk, tag=tag)
        if isinstance(self._outer, UncheckedAllReduce):
            return self._outer.all_reduce_agreed(chunk, op=op, out=chunk)
        return self._outer.all_reduce(chunk, op=op, out=chunk)


class StagedReduction:
    """The all-reduce of one tensor.

    Args:
        stages: The groups that its chunks pass.
        x: The tensor, alike on all ranks in shape and dtype.
        op: The operation.
        out: Where the result goes; None for a new tensor.
        across: Schedule between leaders. None: their group's own.
        may_move: Whether the memory of `x` may move; None if this is not a moving call.
    """

    def __init__(
        self,
        stages: ReductionStages,
        x: Tensor,
        op: Op,
        out: Tensor | None,
        *,
        across: Schedule | None,
        may_move: bool | None,
    ) -> None:
        reduction_rules.check_operation(op, x.dtype)
        self._stages, self._op, self._out, self._across = stages, op, out, across
        self._may_move = may_move
        self._x = x.detach().resolve_conj().resolve_neg()
        self._target = empty_on_cpu(x.shape, x.dtype) if out is None else out.detach()
        # `flat` is where the result is put together: the target, if its elements are in order.
        self._in_order = is_plain(self._target)
        self._flat = (
            self._target.view(-1) if self._in_order else empty_on_cpu((x.numel(),), x.dtype)
        )

    def flows(self) -> Iterator[Flow]:
        """Yield the way of each chunk through the stages."""
        op, flat, source = self._op, self._flat, self._x.reshape(-1)
        held = reduction_rules.accumulation_dtype(source.dtype, op)
        added = cast("Op", "sum" if op == "mean" else op)
        if reduction_rules.overlaps_partly(source, flat):
            source = source.clone()  # else a chunk would overwrite what a later one reads
        moving = self._may_move is not None and held == source.dtype and self._stages.moves_memory
        for start, stop in cut_chunks(flat.numel()):
            # The first chunk moves the whole tensor, so all later ones are there already.
            to_move = flat if self._may_move and self._in_order and not start else None
            inside = (
                partial(self._stages.sum_in_place, to_move) if moving else self._stages.sum_in_host
            )
            chunk = self._stages.reduce_chunk(
                source[start:stop], flat[start:stop], (held, op, added), inside, self._across
            )
            yield Flow(chunk, stop - start)

    def conclude(self) -> Tensor:
        """Return the result, when all chunks have passed."""
        if not self._in_order:
            self._target.copy_(self._flat.view(self._x.shape))
        return self._target if self._out is None else self._out
