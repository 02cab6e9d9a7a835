"""All-reduce of a small tensor with as little Python as possible.

Other ranks may take the way of `shared_reductions.all_reduce_small` in the same call: memory, marks
and posts are the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm.fingerprint import CallFingerprint, reduction_call
from paceline.comm.group_protocol import Op
from paceline.comm.reduction_rules import is_allowed
from paceline.comm.shm.segment import Steps
from paceline.comm.shm.shared_reductions import MISMATCH, SmallReduction, describe_small
from paceline.comm.shm.shared_segment import empty_on_cpu
from paceline.comm.shm.work_queue import QueuedWork, WorkQueue
from paceline.native.functions import address_of

ENTRIES = 4096  # calls that are remembered
_NO_STEPS: Steps = (target for target in range(0))  # until ranks have to compare their calls


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
            or x.nbytes > self._queue.segment.small
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

    inference = False  # C writes to any tensor
    steps = _NO_STEPS
    result: Tensor
    _compares = False  # whether ranks compare the texts of their calls, as marks differ

    def __init__(self, queue: WorkQueue, small: SmallCall, x: Tensor, out: Tensor) -> None:
        self.queue, self.call, self._small, self._x, self.result = queue, small.call, small, x, out

    def advance(self) -> bool:
        if self._compares:
            return super().advance()
        queue, segment = self.queue, self.queue.segment
        if not self.target:
            # Ranks have rarely come at once, so the next look is in the wait.
            self.target = queue.native.begin_small(
                segment.operation,
                segment.pointer,
                self._small.address,
                self._x.data_ptr(),
                self.result.data_ptr(),
            )
            return False
        status = queue.native.advance_short(segment.operation)
        if status == MISMATCH:
            self._compares, self.steps, self.target = True, segment.compare_calls(self.call), 0
            return super().advance()
        return bool(status == 0)

    def wait(self, timeout: float | None = None) -> Tensor:
        if not self.ended and self.target and self.queue.finish_small(self):
            return self.result
        super().wait(timeout)
        return self.result
