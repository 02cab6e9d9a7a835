"""A Group on torch.distributed: Gloo for CPU tensors, NCCL between GPUs, and Gloo beneath both for
what is agreed.

    all_reduce of                                  goes by
    a few KB, or up to 512 KB between two          every rank's part to every rank, added in rank
                                                   order
    up to 512 KB                                   each rank adds the chunk it owns, over sockets of
                                                   our own (`control`)
    what Gloo adds itself, larger                  Gloo's ring
    the halves, and dtypes Gloo doesn't know       each rank adds the chunk it owns, in float32 for
                                                   the halves (`schedule.owners`)
    CUDA tensors, backend "gloo"                   the same, through the processor's memory
    CUDA tensors, backend "nccl"                   NCCL, the halves as float32

Gloo ends the process when ranks bring different sizes; so every call is compared on the control
connections before it starts.
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
from paceline.comm import collectives, fingerprint, reduction, schedule
from paceline.comm.cancellation import CancelScope
from paceline.comm.fingerprint import DIGEST, CallFingerprint
from paceline.comm.group import Finished, Op, Traffic, Work, as_begun, begun
from paceline.comm.native.transport import (
    MESSAGES,
    SMALL_MESSAGE,
    GlooTransport,
    GlooWait,
    StreamWait,
    TransportWork,
)
from paceline.comm.shm.messages import plain
from paceline.comm.traffic import TrafficMeter
from paceline.errors import Mismatch, PacelineError, UsageError, ViewChanged
from paceline.trace import Trace

if TYPE_CHECKING:  # torch's stubs know this name only where it comes from
    from torch._C._distributed_c10d import Store as TorchStore
else:
    from torch.distributed import Store as TorchStore

# the first tag of collectives, and how many there are; of so many of them it is remembered which
# they are
TAGS, RECENT = 1 << 20, 1024
SMALL = 16 << 10  # bytes, of all ranks together, that everyone sends to everyone
# what Gloo reduces
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
    """A `Group` of processes connected by Gloo, and by NCCL as well if `backend` is "nccl"; made
    by `from_store`.
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
        self._fabric, self._store, self._meter = fabric, store, meter
        self._nccl: Any = _nccl(store, fabric) if backend == "nccl" else None
        self.traffic: Traffic = meter.traffic
        self._subs = self._tags = 0
        self._calls: dict[int, str] = {}  # what the last tags were reserved for
        self._address = "127.0.0.1"
        self.trace = Trace(0)  # records native all-reduces

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
        """Meet over a store, under a prefix that no other group uses; collective.

        Messages that bypass the store aren't signed.

        `address`: the local address that the others reach (None: loopback, all ranks on one
        machine). `deadline`: seconds that a wait may take. `hosts`: the host of each rank, for the
        traffic counted. `ranks`: what the members are called among all workers (None: these are all
        workers). Raises `DeadlineExceeded` naming ranks that never come.
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
        """The host of each rank, as far as is known here."""
        return self._meter.hosts

    @property
    def deadline(self) -> float:
        """Seconds that a wait may take."""
        return self._fabric.deadline

    @property
    def broken(self) -> PacelineError | None:
        """Why nothing can be called any more, if so."""
        return self._fabric.broken

    def reserve(self) -> tuple[Store, str]:
        """Return a part of the store that nobody else uses, and the address at which others
        reach this worker. Collective.
        """
        self.check(CallFingerprint("reserve"))
        self._subs += 1
        return self._store.sub(f"sub{self._subs}"), self._address

    @property
    def waited(self) -> float:
        """Seconds spent waiting for ranks that came later to a compared call or an agreement."""
        return self._fabric.waited

    # ---- comparing

    def check(self, call: CallFingerprint, extra: bytes = b"") -> list[bytes]:
        """Compare `call` with all ranks; return every rank's `extra`.

        Raises on all ranks if they differ.
        """
        mine = fingerprint.digest(call)
        answers = self._fabric.table("calls", mine + extra, str(call))
        if any(answer[:DIGEST] != mine for answer in answers) or call.flaw:
            texts = self._fabric.table(
                "calls", msgpack.packb((str(call), call.flaw, callsite.place())), str(call)
            )
            heads = [msgpack.unpackb(text) for text in texts]
            fingerprint.compare(
                [(text, flaw) for text, flaw, _ in heads],
                self._fabric.names,
                [line for _, _, line in heads],
            )
        return [answer[DIGEST:] for answer in answers]

    def _tag(self, what: str) -> int:
        """Reserve tags for the next operation, so that several may be under way: each rank makes
        them in the same order.

        `what`: the operation, in messages.
        """
        self._tags = (self._tags + 4) % TAGS
        self._calls[self._tags] = what
        self._calls.pop((self._tags - 4 * RECENT) % TAGS, None)
        return TAGS + self._tags

    # ---- reductions

    def all_reduce(
        self, x: Tensor, *, op: Op = "sum", name: str | None = None, out: Tensor | None = None
    ) -> Work[Tensor]:
        """Reduce every rank's `x`.

        Returns when all ranks have called it; the reduction itself is under way then.
        """
        self.check(fingerprint.reducing("all_reduce", x, op, name, out))
        return self.all_reduce_agreed(x, op=op, out=out)

    def all_reduce_agreed(
        self, x: Tensor, *, op: Op = "sum", out: Tensor | None = None
    ) -> Work[Tensor]:
        """Reduce as `all_reduce` does, without comparing first: only for an agreed layout, as
        Gloo ends the process if sizes differ.
        """
        reduction.admit(op, x.dtype)
        x = x.detach().resolve_conj().resolve_neg()
        out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
        nccl = self._nccl is not None and x.is_cuda
        if x.device.type != "cpu" and not nccl:
            return _CopiedWork(self.all_reduce_agreed(x.cpu(), op=op), out)
        held = reduction.wide(x.dtype, op) if nccl else x.dtype
        additive = x.is_complex() and op in ("sum", "mean")
        nbytes = x.numel() * x.element_size()
        small = not nccl and nbytes <= SMALL_MESSAGE
        if self.size == 1 or (small and (self.size == 2 or nbytes * self.size <= SMALL)):
            return self._scheduled(x, schedule.direct(self.size), op, out)
        if small or (held not in NATIVE and not additive):
            return self._scheduled(x, schedule.owners(self.size), op, out)
        with as_begun(begun(out)):
            staged = _staged(x, out, held)
        return self._reduce(x, op, out, staged)

    def _scheduled(self, x: Tensor, plan: schedule.Schedule, op: Op, out: Tensor) -> Work[Tensor]:
        began = time.perf_counter_ns()
        work = collectives.all_reduce_agreed(
            self, x, plan, op, out=out, tag=self._tag("all_reduce")
        )

        def steps() -> Generator[Work[Any], None, Tensor]:
            yield work
            self._note(began)
            return out

        return collectives.GeneratorWork(steps()) if self.trace.kept else work

    def _note(self, began: int) -> None:
        self.trace.record(
            "all-reduce",
            "between" if len(set(self._meter.hosts)) > 1 else "within",
            began,
            time.perf_counter_ns(),
        )

    def _reduce(self, x: Tensor, op: Op, out: Tensor, held: Tensor) -> Work[Tensor]:
        """Start Gloo's or NCCL's own all-reduce of `held`, which holds the values of `x`."""
        real = torch.view_as_real(held) if held.is_complex() else held
        began = time.perf_counter_ns()
        # both go round a ring: 2(n-1)/n of the tensor from each rank
        self._meter.ring(held.numel() * held.element_size())

        def finish() -> Tensor:
            self._note(began)
            reduction.finish(op, held, self.size)
            if held.data_ptr() != out.data_ptr():
                out.detach().copy_(held)
            return out

        options: Any = torch.distributed.AllreduceOptions()
        options.reduceOp = OPERATIONS[op]
        return self._launch("all_reduce", lambda on: on.allreduce([real], options), finish, out)

    def _launch(
        self, text: str, start: Callable[[Any], Any], finish: Callable[[], Any], out: Tensor
    ) -> Work[Any]:
        """Start a collective of NCCL, if `out` is on a GPU, or Gloo, which `finish` writes to
        `out`; all start them in the same order.
        """
        on_gpu = self._nccl is not None and out.is_cuda
        call_number = self._fabric.count("data")
        try:
            awaited = (
                StreamWait(start(self._nccl))
                if on_gpu
                else self._fabric.track(GlooWait(start(self._fabric.data)))
            )
        except RuntimeError as error:
            raise self._fabric.fail(text, error) from error
        return TransportWork(self._fabric, awaited, ("data", call_number, text), finish, [out])

    def reduce_scatter(self, x: Tensor, *, op: Op = "sum", name: str | None = None) -> Work[Tensor]:
        self.check(fingerprint.reducing("reduce_scatter", x, op, name))
        return self.reduce_scatter_agreed(x, op=op)

    def reduce_scatter_agreed(self, x: Tensor, *, op: Op = "sum") -> Work[Tensor]:
        """Reduce as `reduce_scatter` does, without comparing first."""
        return collectives.reduce_scatter(self, x, op, tag=self._tag("reduce_scatter"))

    # ---- messages

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        *,
        tag: int = 0,
    ) -> Work[None]:
        call = fingerprint.exchanging(sends, recvs, tag, self.size)
        mine = [[[peer, fingerprint.parcel(x)] for peer, x in side] for side in (sends, recvs)]
        tables = [msgpack.unpackb(extra) for extra in self.check(call, msgpack.packb(mine))]
        for source, (sent, _) in enumerate(tables):
            for to, (_, awaited) in enumerate(tables):
                left, right = (
                    [what for peer, what in sent if peer == to],
                    [what for peer, what in awaited if peer == source],
                )
                if left != right:
                    offers, expects = ", ".join(left) or "nothing", ", ".join(right) or "nothing"
                    raise Mismatch(
                        f"exchange: rank {source} sends {offers} to rank {to}, which expects "
                        f"{expects}"
                    )
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
            self._meter.sent(to, x.numel() * x.element_size())
        if self._nccl is not None and any(x.is_cuda for _, x in (*sends, *recvs)):
            return self._exchange_nccl(sends, recvs)
        call_number = self._fabric.count("exchange")
        mine = [x.detach().clone() for to, x in sends if to == self.rank]
        landings = [(source, x, _landing(x)) for source, x in recvs if source != self.rank]
        out = [
            (to, _values(x.detach().to("cpu"))) for to, x in sends if to != self.rank and x.numel()
        ]
        into = [(source, landing) for source, _, landing in landings if landing.numel()]

        def finish() -> None:
            for _, x, landing in landings:
                if landing is not x:
                    x.detach().copy_(landing)
            for (_, x), sent in zip(
                [pair for pair in recvs if pair[0] == self.rank], mine, strict=True
            ):
                x.detach().copy_(sent.view(x.shape))

        ticket = self._fabric.messages(out, into, MESSAGES + tag)
        what = self._calls.get((tag - TAGS) // 4 * 4, f"exchange, tag {tag}")
        return TransportWork(
            self._fabric, ticket, ("exchange", call_number, what), finish, [x for _, x in recvs]
        )

    def _exchange_nccl(
        self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]]
    ) -> Work[None]:
        """Exchange all messages as one NCCL group; matched by their order, as NCCL has no tags."""
        device = torch.device("cuda", torch.cuda.current_device())
        out = [(to, _values(x.detach())) for to, x in sends if x.numel()]
        landings = [
            (source, x, x if plain(x) else torch.empty(x.shape, dtype=x.dtype, device=device))
            for source, x in recvs
        ]
        call_number = self._fabric.count("exchange")
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
            self._fabric,
            StreamWait(work),
            ("exchange", call_number, "exchange"),
            finish,
            [x for _, x in recvs],
        )

    def all_gather(self, x: Tensor, *, name: str | None = None) -> Work[list[Tensor]]:
        rows = self.check(
            fingerprint.rows("all_gather", x, name), struct.pack("<q", x.shape[0] if x.dim() else 0)
        )
        shapes = [(struct.unpack("<q", row)[0], *x.shape[1:]) if x.dim() else () for row in rows]
        return collectives.all_gather(self, x, shapes, tag=self._tag("all_gather"))

    def all_to_all(self, xs: Sequence[Tensor], *, name: str | None = None) -> Work[list[Tensor]]:
        call = fingerprint.dealing(xs, self.size, name)
        counts = [] if call.flaw else [x.shape[0] if x.dim() else 0 for x in xs]
        table = [msgpack.unpackb(extra) for extra in self.check(call, msgpack.packb(counts))]
        shapes = [(row[self.rank], *xs[0].shape[1:]) if xs[0].dim() else () for row in table]
        return collectives.all_to_all(self, xs, shapes, tag=self._tag("all_to_all"))

    def broadcast(self, x: Tensor, *, root: int = 0, name: str | None = None) -> Work[Tensor]:
        self.check(fingerprint.rooted(x, root, self.size, name))
        if not x.numel() or self.size == 1:
            return Finished(x)
        kept = x.detach()
        children = _children((self.rank - root) % self.size, self.size)
        for child in children:
            self._meter.sent((child + root) % self.size, x.numel() * x.element_size())
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        on_gpu = self._nccl is not None and x.is_cuda
        flat = _values(kept if on_gpu else kept.to("cpu"))
        return self._launch(
            "broadcast",
            lambda on: on.broadcast([_bytes(flat)], options),
            lambda: _filled(x, flat),
            x,
        )

    def barrier(self, *, name: str | None = None) -> Work[None]:
        """Wait for all ranks: the comparison is the barrier, so it has ended when the call
        returns.
        """
        self.check(CallFingerprint("barrier", name))
        return Finished()

    # ---- agreeing

    def gather_objects(self, obj: Any, *, name: str | None = None) -> list[Any]:
        text, call = fingerprint.objects(obj, name)
        return [json.loads(answer) for answer in self.check(call, text.encode())]

    def agree(self, payload: bytes) -> list[bytes]:
        return self._fabric.table("agree", payload, "agree")

    # ---- groups within, memory, ends

    def sub(self, ranks: Sequence[int]) -> TorchGroup | None:
        self.check(fingerprint.choosing(ranks, self.size))
        self._subs += 1
        if self.rank not in ranks:
            return None
        return TorchGroup.from_store(
            self._store.sub(f"sub{self._subs}"),
            list(ranks).index(self.rank),
            len(ranks),
            backend=self.backend,
            address=self._address,
            deadline=self._fabric.deadline,
            hosts=self._meter.choose(ranks),
            ranks=[self._fabric.names[rank] for rank in ranks],
            view=self.view,
            cancel_scope=self._fabric.cancel_scope,
        )

    def global_rank(self, rank: int) -> int:
        return self._fabric.names[rank]

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate ordinary memory: the network has none that is faster.

        On the GPU if the backend is "nccl".
        """
        self.check(CallFingerprint("empty", None, tuple(shape), dtype))
        with torch.inference_mode(False):  # it may outlive an evaluation that it is first used in
            return torch.empty(
                tuple(shape), dtype=dtype, device="cuda" if self._nccl is not None else "cpu"
            )

    def close(self) -> None:
        """Leave without waiting for the others; ranks that still need this one get an error that
        it is gone.
        """
        self._nccl = None
        self._fabric.close()

    def abort(self) -> None:
        """End every pending Work with an error, here and at the others."""
        self.end(
            ViewChanged(f"this group has been aborted by rank {self._fabric.names[self.rank]}")
        )

    def end(self, error: PacelineError) -> PacelineError:
        """End everything under way, on all ranks, with `error`, or with that of the rank that
        was first; return that.
        """
        ended = self._fabric.end(error)
        if self._nccl is not None:
            self._nccl.abort()
        return ended


def _nccl(store: Store, fabric: GlooTransport) -> Any:
    """Make NCCL beside the transport, for tensors on the current CUDA device."""
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        raise UsageError(
            "backend='nccl' needs a CUDA device and a torch built with NCCL; "
            "use backend='gloo' on this machine"
        )
    nccl: Any = torch.distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=fabric.deadline)
    return nccl(store.sub("nccl").torch, fabric.rank, fabric.size, options)


def _staged(x: Tensor, out: Tensor, held: torch.dtype) -> Tensor:
    """Return a contiguous tensor with the values of `x`, to be reduced in place: `out` if it can
    be.
    """
    direct = held == out.dtype and plain(out) and not reduction.crossing(x, out)
    staged = out.detach() if direct else torch.empty(x.shape, dtype=held, device=x.device)
    return staged if staged.data_ptr() == x.data_ptr() and x.is_contiguous() else staged.copy_(x)


def _landing(x: Tensor) -> Tensor:
    """Return where what comes for `x` is received: `x` itself if it can be."""
    return x if x.device.type == "cpu" and plain(x) else torch.empty(x.shape, dtype=x.dtype)


def _values(x: Tensor) -> Tensor:
    """Return the values of `x` in a contiguous tensor: complex numbers may be marked as
    conjugate, their parts as negative.
    """
    return x.resolve_conj().resolve_neg().contiguous()


def _bytes(x: Tensor) -> Tensor:
    return x.detach().view(-1).view(torch.uint8)


def _filled(x: Tensor, flat: Tensor) -> Tensor:
    if flat.data_ptr() != x.data_ptr() or flat.device != x.device or not plain(x):
        x.detach().copy_(flat)
    return x


def _children(place: int, size: int) -> list[int]:
    """Return the ranks that `place` sends to in a binomial tree with root 0, which is how Gloo
    broadcasts (and about what NCCL sends).
    """
    bits = range((size - 1).bit_length())
    free = [bit for bit in bits if place & ((1 << (bit + 1)) - 1) == 0]
    return [place | 1 << bit for bit in free if place | 1 << bit < size]


class _CopiedWork:
    """The Work of a reduction whose result is copied to where it is wanted."""

    def __init__(self, work: Work[Tensor], out: Tensor) -> None:
        self._work, self._out, self._inference = work, out, begun(out)
        self._copied = False

    def wait(self, timeout: float | None = None) -> Tensor:
        result = self._work.wait(timeout)
        if not self._copied:
            with as_begun(self._inference):
                self._out.detach().copy_(result)
            self._copied = True
        return self._out

    def done(self) -> bool:
        return self._work.done()

    def exception(self) -> BaseException | None:
        return self._work.exception()
