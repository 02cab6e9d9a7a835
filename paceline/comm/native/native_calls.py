"""Collectives and messages of Gloo and NCCL themselves, as works.

Gloo moves tensors in the CPU's memory, NCCL those on a GPU. All ranks begin collectives in the same
order, and neither library compares calls: the group has done so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from paceline.cluster.store import Store
from paceline.comm import reduction_rules
from paceline.comm.group_protocol import FinishedWork, Op, Work
from paceline.comm.native.transport import GlooTransport, GlooWait, StreamWait, TransportWork
from paceline.comm.shm.window_messages import is_plain
from paceline.comm.traffic_meter import TrafficMeter
from paceline.errors import UsageError

OPERATIONS = {
    "sum": ReduceOp.SUM,
    "mean": ReduceOp.SUM,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "product": ReduceOp.PRODUCT,
}


class NativeCalls:
    """Begins calls of Gloo, or of NCCL for tensors on a GPU.

    Args:
        transport: Gloo's connections.
        meter: Counts the bytes that collectives send.
        nccl: A process group of NCCL. None: all tensors are in the CPU's memory.
    """

    def __init__(self, transport: GlooTransport, meter: TrafficMeter, nccl: Any) -> None:
        self._transport, self._meter, self._nccl = transport, meter, nccl
        self._rank = transport.rank

    def uses_nccl(self, x: Tensor) -> bool:
        """Whether NCCL moves this tensor."""
        return self._nccl is not None and x.is_cuda

    def close(self) -> None:
        """Let NCCL go."""
        self._nccl = None

    def abort(self) -> None:
        """End every call of NCCL with an error."""
        if self._nccl is not None:
            self._nccl.abort()

    def reduce(
        self, x: Tensor, op: Op, out: Tensor, held: Tensor, record: Callable[[int], None]
    ) -> Work[Tensor]:
        """Begin the all-reduce of Gloo or NCCL itself, in `held`, which has the values of `x`.

        `record`: called with the time of the beginning when the sum is there.
        """
        real = torch.view_as_real(held) if held.is_complex() else held
        began = time.perf_counter_ns()
        # Both go round a ring: 2(n-1)/n of the tensor from each rank.
        self._meter.count_ring(held.numel() * held.element_size())

        def finish() -> Tensor:
            record(began)
            reduction_rules.finish_reduction(op, held, self._transport.size)
            if held.data_ptr() != out.data_ptr():
                out.detach().copy_(held)
            return out

        options: Any = torch.distributed.AllreduceOptions()
        options.reduceOp = OPERATIONS[op]
        return self._launch("all_reduce", lambda on: on.allreduce([real], options), finish, out)

    def broadcast(self, x: Tensor, root: int) -> Work[Tensor]:
        """Begin to copy the root's `x` to all ranks."""
        size = self._transport.size
        if not x.numel() or size == 1:
            return FinishedWork(x)
        values = x.detach()
        children = _broadcast_children((self._rank - root) % size, size)
        for child in children:
            self._meter.count_sent((child + root) % size, x.numel() * x.element_size())
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        on_gpu = self._nccl is not None and x.is_cuda
        flat = _contiguous_values(values if on_gpu else values.to("cpu"))
        return self._launch(
            "broadcast",
            lambda on: on.broadcast([_view_bytes(flat)], options),
            lambda: _fill_from(x, flat),
            x,
        )

    def _launch(
        self, text: str, start: Callable[[Any], Any], finish: Callable[[], Any], out: Tensor
    ) -> Work[Any]:
        """Begin a collective of NCCL if `out` is on a GPU, else of Gloo.

        All ranks begin these in the same order.

        Args:
            text: Name of the call, for errors.
            start: Begins it on a process group of torch.
            finish: Writes the result to `out`, and returns it.
            out: Where the result goes.
        """
        on_gpu = self._nccl is not None and out.is_cuda
        call_number = self._transport.count_call("data")
        try:
            awaited = (
                StreamWait(start(self._nccl))
                if on_gpu
                else self._transport.track_wait(GlooWait(start(self._transport.data)))
            )
        except RuntimeError as error:
            raise self._transport.handle_failure(text, error) from error
        return TransportWork(self._transport, awaited, ("data", call_number, text), finish, [out])

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
        what: str,
    ) -> Work[None]:
        """Begin to send and receive messages, to and from these ranks.

        `what`: the name of the call in errors.
        """
        if self._nccl is not None and any(x.is_cuda for _, x in (*sends, *recvs)):
            return self._exchange_nccl(sends, recvs)
        call_number = self._transport.count_call("exchange")
        # Messages to this rank itself are copied; the others go through the CPU's memory.
        to_self = [x.detach().clone() for to, x in sends if to == self._rank]
        landings = [(source, x, _make_landing(x)) for source, x in recvs if source != self._rank]
        out = [
            (to, _contiguous_values(x.detach().to("cpu")))
            for to, x in sends
            if to != self._rank and x.numel()
        ]
        into = [(source, landing) for source, _, landing in landings if landing.numel()]

        def finish() -> None:
            for _, x, landing in landings:
                if landing is not x:
                    x.detach().copy_(landing)
            for (_, x), sent in zip(
                [pair for pair in recvs if pair[0] == self._rank], to_self, strict=True
            ):
                x.detach().copy_(sent.view(x.shape))

        ticket = self._transport.start_messages(out, into, tag)
        return TransportWork(
            self._transport, ticket, ("exchange", call_number, what), finish, [x for _, x in recvs]
        )

    def _exchange_nccl(
        self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]]
    ) -> Work[None]:
        """Exchange all messages as one NCCL group; matched by their order, as NCCL has no tags."""
        device = torch.device("cuda", torch.cuda.current_device())
        out = [(to, _contiguous_values(x.detach())) for to, x in sends if x.numel()]
        landings = [
            (source, x, x if is_plain(x) else torch.empty(x.shape, dtype=x.dtype, device=device))
            for source, x in recvs
        ]
        call_number = self._transport.count_call("exchange")
        self._nccl._start_coalescing(device)
        for to, x in out:
            self._nccl.send([x], to, 0)
        for source, x, landing in landings:
            if x.numel():
                self._nccl.recv([landing], source, 0)
        work = self._nccl._end_coalescing(device)

        def finish() -> None:
            for _, x, landing in landings:
                if landing is not x:
                    x.detach().copy_(landing)

        return TransportWork(
            self._transport,
            StreamWait(work),
            ("exchange", call_number, "exchange"),
            finish,
            [x for _, x in recvs],
        )


def make_nccl(store: Store, fabric: GlooTransport) -> Any:
    """Make a NCCL group beside the transport, for tensors on the current CUDA device."""
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        raise UsageError(
            "backend='nccl' needs a CUDA device and a torch built with NCCL; "
            "use backend='gloo' on this machine"
        )
    nccl: Any = torch.distributed.ProcessGroupNCCL
    options = nccl.Options()
    # Private to torch, which sets it in the same way.
    options._timeout = timedelta(seconds=fabric.deadline)
    return nccl(store.open_substore("nccl").torch, fabric.rank, fabric.size, options)


def stage_input(x: Tensor, out: Tensor, held: torch.dtype) -> Tensor:
    """Copy `x` to a contiguous tensor that can be reduced in place: `out` if possible."""
    direct = held == out.dtype and is_plain(out) and not reduction_rules.overlaps_partly(x, out)
    staged = out.detach() if direct else torch.empty(x.shape, dtype=held, device=x.device)
    return staged if staged.data_ptr() == x.data_ptr() and x.is_contiguous() else staged.copy_(x)


def _make_landing(x: Tensor) -> Tensor:
    """Choose the tensor that a message for `x` is received in: `x` itself if possible."""
    return x if x.device.type == "cpu" and is_plain(x) else torch.empty(x.shape, dtype=x.dtype)


def _contiguous_values(x: Tensor) -> Tensor:
    """Make a contiguous tensor of the values of `x`.

    Complex numbers may be marked as conjugate, and their parts as negative.
    """
    return x.resolve_conj().resolve_neg().contiguous()


def _view_bytes(x: Tensor) -> Tensor:
    return x.detach().view(-1).view(torch.uint8)


def _fill_from(x: Tensor, flat: Tensor) -> Tensor:
    if flat.data_ptr() != x.data_ptr() or flat.device != x.device or not is_plain(x):
        x.detach().copy_(flat)
    return x


def _broadcast_children(place: int, size: int) -> list[int]:
    """List the ranks that `place` sends to in a binomial tree with root 0.

    That is how Gloo broadcasts, and about what NCCL sends.
    """
    bits = range((size - 1).bit_length())
    free = [bit for bit in bits if place & ((1 << (bit + 1)) - 1) == 0]
    return [place | 1 << bit for bit in free if place | 1 << bit < size]
