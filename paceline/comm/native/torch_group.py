"""A Group on torch.distributed: Gloo for CPU tensors, NCCL between GPUs.

    all_reduce of                                  way
    a few KB, or up to 512 KB between two          each rank sends to all, and adds in rank order
    up to 512 KB                                   each rank adds its own chunk, over `control`
    dtypes that Gloo adds, larger                  Gloo's ring
    halves, and dtypes that Gloo doesn't add       each rank adds its own chunk (`build_owners`)
    CUDA tensors, backend "gloo"                   the same, through the processor's memory
    CUDA tensors, backend "nccl"                   NCCL, halves as float32

Every call is compared over the control connections before it starts, as Gloo ends the process if
ranks bring different sizes. Halves are added in float32.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgpack
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from paceline import callsite
from paceline.cluster.store import Store, over
from paceline.comm import collectives, fingerprint, reduction_rules, schedule
from paceline.comm.cancellation import CancelScope
from paceline.comm.fingerprint import DIGEST, CallFingerprint
from paceline.comm.group_protocol import (
    FinishedWork,
    Op,
    Traffic,
    Work,
    needs_inference_mode,
    resume_mode,
)
from paceline.comm.native.transport import (
    MESSAGES,
    SMALL_MESSAGE,
    GlooTransport,
    GlooWait,
    StreamWait,
    TransportWork,
)
from paceline.comm.shm.window_messages import is_plain
from paceline.comm.traffic_meter import TrafficMeter
from paceline.errors import PacelineError, UsageError, ViewChanged
from paceline.trace import Trace

if TYPE_CHECKING:  # torch's stubs know this name only where it comes from
    from torch._C._distributed_c10d import Store as TorchStore
else:
    from torch.distributed import Store as TorchStore

TAGS = 1 << 20  # first tag of collectives, and number of their tags
RECENT = 1024  # last collectives whose names are kept for messages
SMALL = 16 << 10  # bytes of all ranks together that every rank sends to every rank
# Dtypes that Gloo reduces.
NATIVE = (torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)
OPERATIONS = {
    "sum": ReduceOp.SUM,
    "mean": ReduceOp.SUM,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "product": ReduceOp.PRODUCT,
}
BACKENDS = ("gloo", "nccl")


class TorchGroup:
    """A `Group` of processes connected by Gloo, and by NCCL if `backend` is "nccl".

    `TorchGroup.from_store` makes one.
    """

    def __init__(
        self,
        fabric: GlooTransport,
        store: Store,
        *,
        backend: str,
        meter: TrafficMeter,
        view: int = 0,
    ) -> None:
        self.rank, self.size, self.view = fabric.rank, fabric.size, view
        self.backend = backend
        self._transport, self._store, self._meter = fabric, store, meter
        self._nccl: Any = _make_nccl(store, fabric) if backend == "nccl" else None
        self.traffic: Traffic = meter.traffic
        self._reserved_parts = self._tags = 0  # subgroups and reservations made; tags given
        self._tag_names: dict[int, str] = {}  # names of the last calls, by tag
        self._address = "127.0.0.1"
        self.trace = Trace(0)  # gets a span for each all-reduce of torch

    @classmethod
    def from_store(
        cls,
        store: TorchStore | Store,
        rank: int,
        size: int,
        *,
        backend: str = "gloo",
        address: str | None = None,
        deadline: float = 120.0,
        hosts: Sequence[int] | None = None,
        ranks: Sequence[int] | None = None,
        view: int = 0,
        cancel_scope: CancelScope | None = None,
    ) -> TorchGroup:
        """Meet over a store, and connect. Collective.

        Messages between ranks are not signed, unlike those of the store.

        Args:
            store: Store of torch, or a part of ours that no other group uses.
            rank: This rank.
            size: Number of ranks.
            backend: "gloo" (default) or "nccl".
            address: Address of this worker that the others reach. Default: loopback.
            deadline: Seconds that a wait may take. Default: 120.
            hosts: Host of each rank, for the count of traffic. Default: all on one.
            ranks: Rank of each member among all workers. Default: these are all workers.
            view: Number of the membership. Default: 0.
            cancel_scope: Ends waits of the group when it trips. Default: none.

        Raises:
            DeadlineExceeded: Some ranks never come; names them.
        """
        if backend not in BACKENDS:
            raise UsageError(f"backend={backend!r} is unknown; there are {', '.join(BACKENDS)}")
        if not 0 <= rank < size:
            raise UsageError(f"rank {rank} is not one of 0..{size - 1}")
        if hosts is not None and len(hosts) != size:
            raise UsageError(
                f"hosts has {len(hosts)} entries for {size} ranks; give the host of each rank"
            )
        address = address or "127.0.0.1"
        fabric = GlooTransport(
            store,
            rank,
            range(size) if ranks is None else ranks,
            address=address,
            deadline=deadline,
            cancel_scope=cancel_scope,
        )
        group = cls(
            fabric, over(store), backend=backend, meter=TrafficMeter(rank, size, hosts), view=view
        )
        group._address = address
        return group

    @property
    def hosts(self) -> tuple[int, ...]:
        """Host of each rank, as it was given."""
        return self._meter.hosts

    @property
    def deadline(self) -> float:
        """Seconds that a wait may take."""
        return self._transport.deadline

    @property
    def broken(self) -> PacelineError | None:
        """The error that every later call raises; None if the group is in order."""
        return self._transport.broken

    def reserve_store(self) -> tuple[Store, str]:
        """Reserve a part of the store for the caller. Collective.

        Returns it, and the address at which others reach this worker.
        """
        self.check_call(CallFingerprint("reserve"))
        self._reserved_parts += 1
        return self._store.sub(f"sub{self._reserved_parts}"), self._address

    @property
    def waited(self) -> float:
        """Seconds spent waiting for slower ranks, in compared calls and agreements."""
        return self._transport.waited

    # ---- comparing calls

    def check_call(self, call: CallFingerprint, extra: bytes = b"") -> list[bytes]:
        """Compare `call` on all ranks, and return every rank's `extra`, in rank order.

        Raises on all ranks if calls differ, or one has a flaw.
        """
        own_digest = fingerprint.digest_call(call)
        answers = self._transport.gather_table("calls", own_digest + extra, str(call))
        if any(answer[:DIGEST] != own_digest for answer in answers) or call.flaw:
            # All ranks see the same digests, so all of them exchange the texts for the error.
            texts = self._transport.gather_table(
                "calls", msgpack.packb((str(call), call.flaw, callsite.place())), str(call)
            )
            heads = [msgpack.unpackb(text) for text in texts]
            fingerprint.check_calls_agree(
                [(text, flaw) for text, flaw, _ in heads],
                self._transport.names,
                [line for _, _, line in heads],
            )
        return [answer[DIGEST:] for answer in answers]

    def _reserve_tags(self, what: str) -> int:
        """Reserve the tags of the next operation, so that several may be under way.

        All ranks reserve in the same order, so they get the same. `what`: its name in messages.
        """
        self._tags = (self._tags + 4) % TAGS
        self._tag_names[self._tags] = what
        self._tag_names.pop((self._tags - 4 * RECENT) % TAGS, None)
        return TAGS + self._tags

    # ---- reductions

    def all_reduce(
        self, x: Tensor, *, op: Op = "sum", name: str | None = None, out: Tensor | None = None
    ) -> Work[Tensor]:
        """Reduce every rank's `x`. It returns, with the sum under way, once all ranks are here."""
        self.check_call(fingerprint.reduction_call("all_reduce", x, op, name, out))
        return self.all_reduce_agreed(x, op=op, out=out)

    def all_reduce_agreed(
        self, x: Tensor, *, op: Op = "sum", out: Tensor | None = None
    ) -> Work[Tensor]:
        """Reduce as `all_reduce` does, without comparing first.

        Only for layouts that ranks have agreed on: Gloo ends the process if sizes differ.
        """
        reduction_rules.check_operation(op, x.dtype)
        x = x.detach().resolve_conj().resolve_neg()
        out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
        on_nccl = self._nccl is not None and x.is_cuda
        if x.device.type != "cpu" and not on_nccl:
            return _CopiedWork(self.all_reduce_agreed(x.cpu(), op=op), out)
        # See the table at the top of the file for the ways.
        held = reduction_rules.accumulation_dtype(x.dtype, op) if on_nccl else x.dtype
        additive = x.is_complex() and op in ("sum", "mean")
        nbytes = x.numel() * x.element_size()
        small = not on_nccl and nbytes <= SMALL_MESSAGE
        if self.size == 1 or (small and (self.size == 2 or nbytes * self.size <= SMALL)):
            return self._reduce_by_schedule(x, schedule.build_direct(self.size), op, out)
        if small or (held not in NATIVE and not additive):
            return self._reduce_by_schedule(x, schedule.build_owners(self.size), op, out)
        with resume_mode(needs_inference_mode(out)):
            staged = _stage_input(x, out, held)
        return self._reduce_natively(x, op, out, staged)

    def _reduce_by_schedule(
        self, x: Tensor, plan: schedule.Schedule, op: Op, out: Tensor
    ) -> Work[Tensor]:
        began = time.perf_counter_ns()
        work = collectives.all_reduce_by_schedule_agreed(
            self, x, plan, op, out=out, tag=self._reserve_tags("all_reduce")
        )

        def steps() -> Generator[Work[Any], None, Tensor]:
            yield work
            self._record_span(began)
            return out

        return collectives.GeneratorWork(steps()) if self.trace.kept else work

    def _record_span(self, began: int) -> None:
        self.trace.record(
            "all-reduce",
            "between" if len(set(self._meter.hosts)) > 1 else "within",
            began,
            time.perf_counter_ns(),
        )

    def _reduce_natively(self, x: Tensor, op: Op, out: Tensor, held: Tensor) -> Work[Tensor]:
        """Begin the all-reduce of Gloo or NCCL itself, in `held`, which has the values of `x`."""
        real = torch.view_as_real(held) if held.is_complex() else held
        began = time.perf_counter_ns()
        # Both go round a ring: 2(n-1)/n of the tensor from each rank.
        self._meter.count_ring(held.numel() * held.element_size())

        def finish() -> Tensor:
            self._record_span(began)
            reduction_rules.finish_reduction(op, held, self.size)
            if held.data_ptr() != out.data_ptr():
                out.detach().copy_(held)
            return out

        options: Any = torch.distributed.AllreduceOptions()
        options.reduceOp = OPERATIONS[op]
        return self._launch_collective(
            "all_reduce", lambda on: on.allreduce([real], options), finish, out
        )

    def _launch_collective(
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

    def reduce_scatter(self, x: Tensor, *, op: Op = "sum", name: str | None = None) -> Work[Tensor]:
        self.check_call(fingerprint.reduction_call("reduce_scatter", x, op, name))
        return self.reduce_scatter_agreed(x, op=op)

    def reduce_scatter_agreed(self, x: Tensor, *, op: Op = "sum") -> Work[Tensor]:
        """Reduce as `reduce_scatter` does, without comparing first."""
        return collectives.reduce_scatter_by_exchange(
            self, x, op, tag=self._reserve_tags("reduce_scatter")
        )

    # ---- messages

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        *,
        tag: int = 0,
    ) -> Work[None]:
        call = fingerprint.exchange_call(sends, recvs, tag, self.size)
        own_messages = [
            [[peer, fingerprint.describe_message(x)] for peer, x in side] for side in (sends, recvs)
        ]
        tables = [
            msgpack.unpackb(extra) for extra in self.check_call(call, msgpack.packb(own_messages))
        ]
        fingerprint.check_messages_match(tables, self._transport.names)
        return self.exchange_agreed(sends, recvs, tag=tag)

    def exchange_agreed(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        *,
        tag: int = 0,
    ) -> Work[None]:
        """Exchange without comparing first."""
        for to, x in sends:
            self._meter.count_sent(to, x.numel() * x.element_size())
        if self._nccl is not None and any(x.is_cuda for _, x in (*sends, *recvs)):
            return self._exchange_nccl(sends, recvs)
        call_number = self._transport.count_call("exchange")
        # Messages to this rank itself are copied; the others go through the CPU's memory.
        to_self = [x.detach().clone() for to, x in sends if to == self.rank]
        landings = [(source, x, _make_landing(x)) for source, x in recvs if source != self.rank]
        out = [
            (to, _contiguous_values(x.detach().to("cpu")))
            for to, x in sends
            if to != self.rank and x.numel()
        ]
        into = [(source, landing) for source, _, landing in landings if landing.numel()]

        def finish() -> None:
            for _, x, landing in landings:
                if landing is not x:
                    x.detach().copy_(landing)
            for (_, x), sent in zip(
                [pair for pair in recvs if pair[0] == self.rank], to_self, strict=True
            ):
                x.detach().copy_(sent.view(x.shape))

        ticket = self._transport.start_messages(out, into, MESSAGES + tag)
        what = self._tag_names.get((tag - TAGS) // 4 * 4, f"exchange, tag {tag}")
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

    def all_gather(self, x: Tensor, *, name: str | None = None) -> Work[list[Tensor]]:
        rows = self.check_call(
            fingerprint.rows_call("all_gather", x, name),
            struct.pack("<q", x.shape[0] if x.dim() else 0),
        )
        shapes = [(struct.unpack("<q", row)[0], *x.shape[1:]) if x.dim() else () for row in rows]
        return collectives.all_gather_by_exchange(
            self, x, shapes, tag=self._reserve_tags("all_gather")
        )

    def all_to_all(self, xs: Sequence[Tensor], *, name: str | None = None) -> Work[list[Tensor]]:
        call = fingerprint.all_to_all_call(xs, self.size, name)
        counts = [] if call.flaw else [x.shape[0] if x.dim() else 0 for x in xs]
        table = [msgpack.unpackb(extra) for extra in self.check_call(call, msgpack.packb(counts))]
        shapes = [(row[self.rank], *xs[0].shape[1:]) if xs[0].dim() else () for row in table]
        return collectives.all_to_all_by_exchange(
            self, xs, shapes, tag=self._reserve_tags("all_to_all")
        )

    def broadcast(self, x: Tensor, *, root: int = 0, name: str | None = None) -> Work[Tensor]:
        self.check_call(fingerprint.broadcast_call(x, root, self.size, name))
        if not x.numel() or self.size == 1:
            return FinishedWork(x)
        values = x.detach()
        children = _broadcast_children((self.rank - root) % self.size, self.size)
        for child in children:
            self._meter.count_sent((child + root) % self.size, x.numel() * x.element_size())
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        on_gpu = self._nccl is not None and x.is_cuda
        flat = _contiguous_values(values if on_gpu else values.to("cpu"))
        return self._launch_collective(
            "broadcast",
            lambda on: on.broadcast([_view_bytes(flat)], options),
            lambda: _fill_from(x, flat),
            x,
        )

    def barrier(self, *, name: str | None = None) -> Work[None]:
        """Wait for all ranks. The comparison is the barrier, so it is over when this returns."""
        self.check_call(CallFingerprint("barrier", name))
        return FinishedWork()

    # ---- the control channel

    def gather_objects(self, obj: Any, *, name: str | None = None) -> list[Any]:
        text, call = fingerprint.objects_call(obj, name)
        return [json.loads(answer) for answer in self.check_call(call, text.encode())]

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        return self._transport.gather_table("agree", payload, "agree")

    # ---- subgroups, memory, the end

    def make_subgroup(self, ranks: Sequence[int]) -> TorchGroup | None:
        self.check_call(fingerprint.subgroup_call(ranks, self.size))
        self._reserved_parts += 1
        if self.rank not in ranks:
            return None
        return TorchGroup.from_store(
            self._store.sub(f"sub{self._reserved_parts}"),
            list(ranks).index(self.rank),
            len(ranks),
            backend=self.backend,
            address=self._address,
            deadline=self._transport.deadline,
            hosts=self._meter.select_hosts(ranks),
            ranks=[self._transport.names[rank] for rank in ranks],
            view=self.view,
            cancel_scope=self._transport.cancel_scope,
        )

    def global_rank(self, rank: int) -> int:
        return self._transport.names[rank]

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate ordinary memory, as no other is faster here; on the GPU with backend "nccl"."""
        self.check_call(CallFingerprint("empty", None, tuple(shape), dtype))
        # It may outlive the evaluation in which it is first used.
        with torch.inference_mode(False):
            return torch.empty(
                tuple(shape), dtype=dtype, device="cuda" if self._nccl is not None else "cpu"
            )

    def close(self) -> None:
        """Leave without waiting for others. Ranks that still need this one get an error."""
        self._nccl = None
        self._transport.close()

    def abort(self) -> None:
        """End every pending Work with an error, on all ranks."""
        self.end_everywhere(
            ViewChanged(f"this group has been aborted by rank {self._transport.names[self.rank]}")
        )

    def end_everywhere(self, error: PacelineError) -> PacelineError:
        """End everything under way on all ranks, and return the error that all of them raise.

        It is `error`, or the error of the rank that ended the group first.
        """
        ended = self._transport.end_everywhere(error)
        if self._nccl is not None:
            self._nccl.abort()
        return ended


def _make_nccl(store: Store, fabric: GlooTransport) -> Any:
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
    return nccl(store.sub("nccl").torch, fabric.rank, fabric.size, options)


def _stage_input(x: Tensor, out: Tensor, held: torch.dtype) -> Tensor:
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


class _CopiedWork:
    """The Work of a reduction whose result is copied to another tensor."""

    def __init__(self, work: Work[Tensor], out: Tensor) -> None:
        self._work, self._out, self._inference = work, out, needs_inference_mode(out)
        self._copied = False

    def wait(self, timeout: float | None = None) -> Tensor:
        result = self._work.wait(timeout)
        if not self._copied:
            with resume_mode(self._inference):
                self._out.detach().copy_(result)
            self._copied = True
        return self._out

    def done(self) -> bool:
        return self._work.done()

    def exception(self) -> BaseException | None:
        return self._work.exception()
