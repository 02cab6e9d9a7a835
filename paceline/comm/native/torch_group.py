"""A Group on torch.distributed: Gloo for CPU tensors, NCCL between GPUs.

    all_reduce of                                  way
    a few KB, or up to 512 KB between two          each rank sends to all, and adds in rank order
    up to 512 KB, or between two                   each rank adds its own chunk (`build_owners`)
    larger, dtypes that Gloo adds                  Gloo's ring
    larger, halves and other dtypes                each rank adds its own chunk
    CUDA tensors, backend "gloo"                   the same, through the processor's memory
    CUDA tensors, backend "nccl"                   NCCL, halves as float32

Every call is compared over the control connections before it starts, as Gloo ends the process if
ranks bring different sizes. A small tensor of `all_reduce` travels with the comparison. C runs the
schedules over the same connections. Halves are added in float32.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgpack
import torch
from torch import Tensor

from paceline import callsite
from paceline.cluster.store import Store, wrap_store
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
from paceline.comm.native.connection_reductions import ConnectionReductions, copy_values
from paceline.comm.native.native_calls import NativeCalls, make_nccl, stage_input
from paceline.comm.native.transport import (
    MESSAGES,
    SMALL_MESSAGE,
    GlooTransport,
)
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
COMPARED = 64 << 10  # bytes of a tensor of two ranks that travels with the comparison of the call
# Dtypes that Gloo reduces.
NATIVE = (torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)
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
        self._native = NativeCalls(
            fabric, meter, make_nccl(store, fabric) if backend == "nccl" else None
        )
        self._over_connections = ConnectionReductions(fabric, meter, self._record_span)
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
            fabric,
            wrap_store(store),
            backend=backend,
            meter=TrafficMeter(rank, size, hosts),
            view=view,
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
        return self._store.open_substore(f"sub{self._reserved_parts}"), self._address

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
                "calls", msgpack.packb((str(call), call.flaw, callsite.find_user_line())), str(call)
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
        call = fingerprint.reduction_call("all_reduce", x, op, name, out)
        if self.carries_with_comparison(x) and not call.flaw:
            began, answers = time.perf_counter_ns(), self.check_call(call, copy_values(x))
            return self._over_connections.reduce_messages(answers, x, op, out, began=began)
        self.check_call(call)
        return self.all_reduce_agreed(x, op=op, out=out)

    def carries_with_comparison(self, x: Tensor) -> bool:
        """Whether `x` is so small that it travels in the message which compares the call."""
        nbytes = x.numel() * x.element_size()
        limit = COMPARED if self.size == 2 else SMALL // self.size
        return x.device.type == "cpu" and self.size > 1 and nbytes <= limit

    def all_reduce_agreed(
        self, x: Tensor, *, op: Op = "sum", out: Tensor | None = None
    ) -> Work[Tensor]:
        """Reduce as `all_reduce` does, without comparing first.

        Only for layouts that ranks have agreed on: Gloo ends the process if sizes differ.
        """
        reduction_rules.check_operation(op, x.dtype)
        x = x.detach().resolve_conj().resolve_neg()
        out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
        on_nccl = self._native.uses_nccl(x)
        if x.device.type != "cpu" and not on_nccl:
            return _CopiedWork(self.all_reduce_agreed(x.cpu(), op=op), out)
        # See the table at the top of the file for the ways.
        held = reduction_rules.accumulation_dtype(x.dtype, op) if on_nccl else x.dtype
        additive = x.is_complex() and op in ("sum", "mean")
        nbytes = x.numel() * x.element_size()
        small = nbytes <= SMALL_MESSAGE
        can_native = held in NATIVE or additive
        at_once = self.size == 1 or (small and self.size == 2) or nbytes * self.size <= SMALL
        plan = (schedule.build_direct if at_once else schedule.build_owners)(self.size)
        if not on_nccl and (small or self.size <= 2 or not can_native):
            return self.reduce_by_schedule(x, plan, op, out)
        if self.size == 1 or not can_native:  # on a GPU
            tag = self._reserve_tags("all_reduce")
            return collectives.all_reduce_by_schedule_agreed(self, x, plan, op, out=out, tag=tag)
        with resume_mode(needs_inference_mode(out)):
            staged = stage_input(x, out, held)
        return self._native.reduce(x, op, out, staged, self._record_span)

    def reduce_by_schedule(
        self, x: Tensor, plan: schedule.Schedule, op: Op, out: Tensor
    ) -> Work[Tensor]:
        """Reduce a tensor in the CPU's memory by a schedule, as `RunsSchedules` describes."""
        return self._over_connections.reduce_by_schedule(x, plan, op, out)

    def _record_span(self, began: int) -> None:
        self.trace.record_span(
            "all-reduce",
            "between" if len(set(self._meter.hosts)) > 1 else "within",
            began,
            time.perf_counter_ns(),
        )

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
        what = self._tag_names.get((tag - TAGS) // 4 * 4, f"exchange, tag {tag}")
        return self._native.exchange(sends, recvs, MESSAGES + tag, what)

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
        return self._native.broadcast(x, root)

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
            self._store.open_substore(f"sub{self._reserved_parts}"),
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
                tuple(shape), dtype=dtype, device="cuda" if self.backend == "nccl" else "cpu"
            )

    def close(self) -> None:
        """Leave without waiting for others. Ranks that still need this one get an error."""
        self._native.close()
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
        self._native.abort()
        return ended


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
