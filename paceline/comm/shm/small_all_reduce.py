"""All-reduce of a small tensor with as little Python as possible.

It is the all-reduce of `shared_reductions.all_reduce_small`, and ranks may mix both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm.fingerprint import CallFingerprint, reduction_call
from paceline.comm.group_protocol import Op
from paceline.comm.reduction_rules import is_allowed
from paceline.comm.shm.segment import SMALL, Steps
from paceline.comm.shm.shared_reductions import MISMATCH, SmallReduction, describe_small
from paceline.comm.shm.shared_segment import empty_on_cpu
from paceline.comm.shm.work_queue import QueuedWork, WorkQueue
from paceline.native.functions import address_of, load_functions

ENTRIES = 4096  # calls that are remembered
_NO_STEPS: Steps = (target for target in range(0))  # of an operation that C does


class SmallCall(NamedTuple):
    """Facts about all calls with one shape, dtype, operation and name."""

    call: CallFingerprint
    values: SmallReduction
    address: int  # of `values`


class SmallCalls:
    """Small calls of a group, by their arguments: the same calls come back at every step."""

    def __init__(self, queue: WorkQueue) -> None:
        self._queue = queue
        self._calls: dict[tuple[str, torch.dtype, torch.Size, str | None], SmallCall | None] = {}

    def start(
        self, x: Tensor, op: Op, name: str | None, out: Tensor | None
    ) -> SmallAllReduce | None:
        """Begin an all-reduce. None if the tensors are no plain small ones."""
        if (
            type(x) is not Tensor
            or (out is not None and out is not x)
            or x.layout is not torch.strided
            or not x.is_cpu
            or x.nbytes > SMALL
            or not x.is_contiguous()
            or x.is_neg()
        ):
            return None
        key = (op, x.dtype, x.shape, name)
        try:
            small = self._calls[key]
        except KeyError:
            small = self._calls[key] = self._describe(x, op, name)
        if small is None:
            return None
        result = empty_on_cpu(x.shape, x.dtype) if out is None else x
        return self._queue.start(SmallAllReduce(self._queue, small, x, result))

    def _describe(self, x: Tensor, op: Op, name: str | None) -> SmallCall | None:
        if len(self._calls) >= ENTRIES:
            self._calls.clear()
        call = reduction_call("all_reduce", x, op, name, x)
        if call.flaw or x.is_complex() or not is_allowed(op, x.dtype):
            return None
        values = describe_small(self._queue.segment, x, op, call)
        return SmallCall(call, values, address_of(values))


class SmallAllReduce(QueuedWork):
    """The all-reduce of one small tensor (a `Work`)."""

    def __init__(self, queue: WorkQueue, small: SmallCall, x: Tensor, out: Tensor) -> None:
        super().__init__(queue, _NO_STEPS, small.call, inference=False)
        self._native = load_functions()
        self._small, self._x, self._out = small, x, out
        self._has_begun = False
        self._compares = False  # whether ranks compare their calls, which are different

    def advance(self) -> bool:
        if self._compares:
            return super().advance()
        native, segment = self._native, self.queue.segment
        if not self._has_begun:
            self._has_begun = True
            x, out = self._x.data_ptr(), self._out.data_ptr()
            self.target = native.begin_small(
                segment.operation, segment.pointer, self._small.address, x, out
            )
            return False
        status = native.advance_short(segment.operation)
        if status > 0:
            return False
        if status == MISMATCH:
            self._compares, self.steps, self.target = True, segment.compare_calls(self.call), 0
            return super().advance()
        self.result = self._out
        return True
