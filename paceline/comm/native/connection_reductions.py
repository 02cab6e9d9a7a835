"""All-reduces of CPU tensors over the connections of a group.

Small tensors come in the messages that compare a call, and are reduced at once. C runs the others
by schedules: see `schedule_run`.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.comm import reduction_rules
from paceline.comm.group_protocol import (
    FinishedWork,
    Op,
    Work,
    needs_inference_mode,
    resume_mode,
)
from paceline.comm.native.native_calls import stage_input
from paceline.comm.native.transport import GlooTransport, TransportWork
from paceline.comm.schedule import Schedule
from paceline.comm.shm.shared_reductions import DTYPES, OPERATIONS
from paceline.comm.shm.window_messages import is_plain
from paceline.comm.traffic_meter import TrafficMeter
from paceline.native.functions import address_of, address_of_bytes, load_functions


class ConnectionReductions:
    """Begins all-reduces of one group.

    Args:
        transport: The connections.
        meter: Counts the bytes that this rank sends.
        record_span: Called with the time of the beginning when a sum is there.
    """

    def __init__(
        self, transport: GlooTransport, meter: TrafficMeter, record_span: Callable[[int], None]
    ) -> None:
        self._transport, self._meter, self._record_span = transport, meter, record_span
        self._size, self._rank = transport.size, transport.rank

    def reduce_by_schedule(self, x: Tensor, plan: Schedule, op: Op, out: Tensor) -> Work[Tensor]:
        """Begin to reduce `x` into `out`, by a schedule of the group's size."""
        began, x = time.perf_counter_ns(), x.detach().resolve_conj().resolve_neg()
        steps = self._transport.plan_reduction(plan, x.numel())
        # Sums that are added in parts are held, and travel, in the dtype of sums; a mean is then
        # divided at the end.
        held = x.dtype if steps.adds_at_once else reduction_rules.accumulation_dtype(x.dtype, op)
        added: Op = "sum" if op == "mean" and not steps.adds_at_once else op
        with resume_mode(needs_inference_mode(out)):
            total = stage_input(x, out, held)

        def finish() -> Tensor:
            self._record_span(began)
            if added != op:
                reduction_rules.finish_reduction(op, total, self._size)
            if total.data_ptr() != out.data_ptr():
                out.detach().copy_(total)
            return out

        for peer, elements in steps.sent:
            self._meter.count_sent(peer, elements * total.element_size())
        wait = ("data", self._transport.count_call("data"), "all_reduce")
        run = self._transport.start_reduction(steps, total, added)
        return TransportWork(self._transport, run, wait, finish, [out])

    def reduce_messages(
        self, messages: Sequence[bytes], x: Tensor, op: Op, out: Tensor | None, *, began: int
    ) -> Work[Tensor]:
        """Reduce what has come with the comparison of the call.

        Args:
            messages: The values of every rank's `x`, from `copy_values`, in rank order.
            x: This rank's tensor.
            op: The operation.
            out: Where the result goes. None: to a new tensor.
            began: time.perf_counter_ns() before the comparison.
        """
        reduction_rules.check_operation(op, x.dtype)
        if out is None:
            out = torch.empty_like(x.detach(), memory_format=torch.contiguous_format)
        for peer in range(self._size):
            if peer != self._rank:
                self._meter.count_sent(peer, len(messages[self._rank]))
        with resume_mode(needs_inference_mode(out)):
            total = out.detach() if is_plain(out) else torch.empty(out.shape, dtype=out.dtype)
            _reduce_values(op, messages, total)
            if total.data_ptr() != out.data_ptr():
                out.detach().copy_(total)
        self._record_span(began)
        return FinishedWork(out)


def copy_values(x: Tensor) -> bytes:
    """Copy the values of a CPU tensor, in the order of its elements."""
    values = x.detach().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(values.data_ptr(), values.numel() * values.element_size())


def _reduce_values(op: Op, messages: Sequence[bytes], total: Tensor) -> None:
    """Reduce the values in `messages`, in their order, to a contiguous tensor of their dtype."""
    parts = (ctypes.c_void_p * len(messages))(*map(address_of_bytes, messages))
    outs = (ctypes.c_void_p * 1)(total.data_ptr())
    load_functions().reduce(
        address_of(outs),
        1,
        address_of(parts),
        len(messages),
        total.numel(),
        DTYPES[total.dtype],
        OPERATIONS[op],
    )
