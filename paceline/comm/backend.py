"""paceline as a backend of torch.distributed: a process group whose collectives are those of our groups.

    dist.init_process_group("paceline")
        dist.all_reduce, DDP, fully_shard, DTensor, pipelining     call a `GroupBackend`
            collectives     a Group: shared memory inside a host, one copy per host between hosts
            send, recv      Gloo, connected when they are first used

An operation is checked before anything moves: workers that call different things get a `Mismatch` with both sides named.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.backend_work import BackendWork, Completer, Composite, Joined, PairWork, ended
from paceline.comm.group import Group, Op, Work, WritesResults
from paceline.errors import UsageError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup, Store
else:
    from torch.distributed import ProcessGroup, Store

REDUCTIONS: dict[Any, Op] = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
}
BITWISE: dict[Any, Callable[..., Tensor]] = {
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
Finish = Callable[[Any], Any]


class GroupBackend(ProcessGroup):
    """A process group of torch.distributed over the `Group` that `meet` makes when the ranks first exchange something.

    `ranks`: what its members are called among all workers. `peers` makes what sends and receives between two ranks (a group of Gloo).
    """

    def __init__(
        self, rank: int, ranks: Sequence[int], meet: Callable[[], Group], store: Store, *, timeout: timedelta, peers: Callable[[], Any]
    ) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]  # the one that can be subclassed
        self._rank, self._size, self._ranks = rank, len(ranks), tuple(ranks)
        self._meet, self._make_peers, self._store, self._timeout = meet, peers, store, timeout
        self._made: Group | None = None
        self._lock = threading.Lock()
        self._peers: Any = None
        self._completer = Completer()
        self._sequence = 0
        self._coalesced: list[BackendWork] | None = None
        self._named = self._described = ""

    @property
    def _group(self) -> Group:
        if self._made is None:
            with self._lock:
                self._made = self._made or self._meet()
        return self._made

    # ---- what torch asks of every process group

    def getBackendName(self) -> str:
        """The name of this backend."""
        return "paceline"

    def name(self) -> str:
        """The name of this backend."""
        return "paceline"

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The name by which torch finds this group again."""
        return self._named or dist.distributed_c10d._world.pg_names[self]

    def _set_group_name(self, name: str) -> None:
        self._named = name

    @property
    def group_desc(self) -> str:
        """What torch says this group is for."""
        return self._described

    def _set_group_desc(self, text: str) -> None:
        self._described = text

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> GroupBackend:  # type: ignore[override]
        if torch.device(device).type != "cpu":
            raise UsageError(f"the backend paceline moves tensors in the processor's memory, and was asked for one on {device}")
        return self

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def get_group_store(self) -> Store:
        """The store that this group was made with."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Give later operations another time to wait."""
        self._timeout = timeout

    def abort(self) -> None:
        """End all that is under way with an error, on all ranks."""
        if self._made is not None:
            self._made.abort()

    def shutdown(self) -> None:
        """Leave in good order."""
        self._completer.close()
        if self._made is not None:
            self._made.close()

    # ---- reductions

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> BackendWork:  # type: ignore[override]  # torch calls one of the overloads
        """Reduce the one tensor given, in place."""
        return self._all_reduce([self._one(tensors, "all_reduce")], opts, tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> BackendWork:
        """Reduce several tensors, in place."""
        return self._all_reduce(tensors, opts, tensors)

    def _all_reduce(self, tensors: Sequence[Tensor], opts: Any, outputs: Any) -> BackendWork:
        op = _reduction(opts)
        if callable(op):
            return self._bitwise(tensors, op, opts, outputs)
        works = [self._group.all_reduce(_real(x), op=op, out=_real(x)) for x in tensors]
        return self._begin(works[0] if len(works) == 1 else Composite(works), None, opts, outputs)

    def _bitwise(self, tensors: Sequence[Tensor], op: Callable[..., Tensor], opts: Any, outputs: Any) -> BackendWork:
        """Reduce by gathering, for operations that groups don't have."""

        def finish(gathered: list[list[Tensor]]) -> None:
            for x, parts in zip(tensors, gathered, strict=True):
                total = parts[0]
                for part in parts[1:]:
                    total = op(total, part)
                x.copy_(total)

        return self._begin(Composite([self._group.all_gather(x) for x in tensors]), finish, opts, outputs)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> BackendWork:  # type: ignore[override]  # torch calls one of the overloads
        """Reduce to one rank, in place there; the tensors of others stay."""
        x, op = self._one(tensors, "reduce"), _reduction(opts)
        root = opts.rootRank if opts is not None else 0
        if callable(op):
            held = x if self._rank == root else x.clone()
            return self._bitwise([held], op, opts, tensors)
        out = _real(x) if self._rank == root else torch.empty_like(_real(x), memory_format=torch.contiguous_format)
        return self._begin(self._group.all_reduce(_real(x), op=op, out=out), None, opts, tensors)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> BackendWork:  # type: ignore[override]  # torch calls one of the overloads
        """Reduce lists of tensors, one for each rank, and keep the one of this rank; sizes may differ between ranks."""
        out, parts = self._one(outputs, "reduce_scatter"), inputs[0]
        if len(parts) != self._size:
            raise UsageError(f"reduce_scatter: {len(parts)} tensors for {self._size} ranks; give one for each rank")
        if all(part.numel() == parts[0].numel() for part in parts):
            return self._reduce_scatter(out, torch.cat([part.reshape(-1) for part in parts]), opts, outputs)
        op = _reduction(opts)
        if callable(op):
            raise UsageError("reduce_scatter: bitwise operations need tensors of one size")
        whole = torch.cat([part.reshape(-1) for part in parts])
        start = sum(part.numel() for part in parts[: self._rank])
        work = self._group.all_reduce(whole, op=op, out=whole)
        return self._begin(work, lambda total: out.copy_(total[start : start + out.numel()].view(out.shape)), opts, outputs)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> BackendWork:
        """Reduce a tensor that holds the parts of all ranks one after another, and keep that of this rank."""
        return self._reduce_scatter(output, source, opts, [output])

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> BackendWork:
        """Reduce several tensors as `reduce_scatter_single` does."""
        return self._joined([self._reduce_scatter(out, x, opts, [out]) for out, x in zip(outputs, inputs, strict=True)], opts, outputs)

    def _reduce_scatter(self, out: Tensor, x: Tensor, opts: Any, outputs: Any) -> BackendWork:
        op = _reduction(opts)
        if out.numel() * self._size != x.numel() or out.dtype != x.dtype:
            sizes = f"{out.dtype} {list(out.shape)} of {x.dtype} {list(x.shape)}"
            raise UsageError(f"reduce_scatter over {self._size} ranks can't give {sizes}: its output has that part of the input")
        if callable(op):
            held = x.clone()
            take = lambda _: out.copy_(held.view(self._size, -1)[self._rank].view(out.shape))  # noqa: E731
            return self._joined([self._bitwise([held], op, opts, outputs)], opts, outputs, take)
        if isinstance(self._group, WritesResults) and out.is_contiguous():
            return self._begin(self._group.reduce_scatter_into(_real(x), _real(out).view(-1), op=op), None, opts, outputs)
        work = self._group.reduce_scatter(_real(x), op=op)
        return self._begin(work, lambda piece: _real(out).copy_(piece.view(_real(out).shape)), opts, outputs)

    # ---- gathering and dealing

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> BackendWork:  # type: ignore[override]  # torch calls one of the overloads
        """Gather the tensors of all ranks, which may differ in the first dim, into a list."""
        x, outs = self._one(inputs, "all_gather"), self._one(outputs, "all_gather")
        if len(outs) != self._size:
            raise UsageError(f"all_gather: {len(outs)} tensors for the results of {self._size} ranks; give one for each rank")
        return self._all_gather(outs, x, opts, outputs)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> BackendWork:
        """Gather several tensors, each into a list; `outputs` has a list for each rank."""
        works = [self._all_gather([outs[i] for outs in outputs], x, opts, outputs) for i, x in enumerate(inputs)]
        return self._joined(works, opts, outputs)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> BackendWork:
        """Gather the tensors of all ranks one after another into one."""
        if output.numel() != source.numel() * self._size or output.dtype != source.dtype:
            sizes = f"{source.dtype} {list(source.shape)} into {output.dtype} {list(output.shape)}"
            raise UsageError(f"all_gather over {self._size} ranks can't put {sizes}: the output holds the inputs of all ranks")
        if output.is_contiguous():
            return self._all_gather(list(output.view(self._size, *source.shape).unbind()), source, opts, [output])
        work = self._group.all_gather(source)
        return self._begin(work, lambda parts: output.copy_(torch.stack(parts).view(output.shape)), opts, [output])

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> BackendWork:
        """Gather several tensors as `all_gather_single` does."""
        return self._joined([self.all_gather_single(out, x, opts) for out, x in zip(outputs, inputs, strict=True)], opts, outputs)

    def _all_gather(self, outs: Sequence[Tensor], x: Tensor, opts: Any, outputs: Any) -> BackendWork:
        fit = all(out.shape == x.shape and out.dtype == x.dtype and out.is_contiguous() for out in outs)
        if fit and isinstance(self._group, WritesResults) and not x.is_complex():
            return self._begin(self._group.all_gather_into(x, outs), None, opts, outputs)
        return self._begin(self._group.all_gather(x), lambda parts: _copy_all(outs, parts), opts, outputs)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> BackendWork:  # type: ignore[override]  # torch calls one of the overloads
        """Give all ranks the values of one, in place."""
        x = self._one(tensors, "broadcast")
        return self._begin(self._group.broadcast(x, root=opts.rootRank if opts is not None else 0), None, opts, tensors)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> BackendWork:  # type: ignore[override]  # torch calls one of the overloads
        """Gather the tensors of all ranks at one."""
        x, root, me = self._one(inputs, "gather"), opts.rootRank if opts is not None else 0, self._rank
        if me != root:
            return self._begin(self._group.exchange([(root, x)], []), None, opts, outputs)
        outs = self._one(outputs, "gather")
        outs[me].copy_(x)
        return self._begin(self._group.exchange([], [(r, out) for r, out in enumerate(outs) if r != me]), None, opts, outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> BackendWork:  # type: ignore[override]  # torch calls one of the overloads
        """Give each rank its tensor of a list that one rank has."""
        out, root, me = self._one(outputs, "scatter"), opts.rootRank if opts is not None else 0, self._rank
        if me != root:
            return self._begin(self._group.exchange([], [(root, out)]), None, opts, outputs)
        parts = self._one(inputs, "scatter")
        out.copy_(parts[me])
        return self._begin(self._group.exchange([(r, part) for r, part in enumerate(parts) if r != me], []), None, opts, outputs)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> BackendWork:
        """Deal a list of tensors, one to each rank; shapes may differ."""
        return self._all_to_all(outputs, inputs, opts, outputs)

    def all_to_all_single(
        self, output: Tensor, source: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> BackendWork:
        """Deal a tensor, cut in its first dim as the splits say, or evenly."""
        outs = list(output.split(output_splits) if output_splits else output.chunk(self._size))
        parts = list(source.split(input_splits) if input_splits else source.chunk(self._size))
        return self._all_to_all(outs, parts, opts, [output])

    def _all_to_all(self, outs: list[Tensor], parts: list[Tensor], opts: Any, outputs: Any) -> BackendWork:
        work = self._group.all_to_all([part.reshape(-1) for part in parts])
        return self._begin(work, lambda found: _copy_all(outs, found), opts, outputs)

    # ---- waiting for all

    def barrier(self, opts: Any = None) -> BackendWork:
        """Wait for all ranks."""
        return self._begin(self._group.barrier(), None, opts, [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks, at most `timeout`; `DeadlineExceeded` names those that didn't come."""
        self._group.barrier().wait((timeout or self._timeout).total_seconds())

    # ---- between two ranks

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> BackendWork:
        """Send a tensor to one rank."""
        work = PairWork(self._pair().send(tensors, to, tag), f"rank {self._ranks[to]} has not received what was sent to it")
        return self._begin(work, None, None, tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> BackendWork:
        """Receive a tensor from one rank."""
        work = PairWork(self._pair().recv(tensors, source, tag), f"rank {self._ranks[source]} has not sent what is awaited from it")
        return self._begin(work, None, None, tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        """Receive a tensor from the rank that sends first; the work knows from which one it came."""
        return self._pair().recv_anysource(tensors, tag)

    def _pair(self) -> Any:
        if self._peers is None:
            self._peers = self._make_peers()
        return self._peers

    # ---- coalescing

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> BackendWork:
        works, self._coalesced = self._coalesced or [], None
        return self._joined(works, None, [])

    # ---- what all of them do

    def _one(self, tensors: Any, what: str) -> Any:
        if len(tensors) != 1:
            raise UsageError(f"{what}: {len(tensors)} tensors, and the backend paceline takes one on each rank")
        return tensors[0]

    def _begin(self, work: Work[Any], finish: Finish | None, opts: Any, outputs: Any) -> BackendWork:
        self._sequence += 1
        begun = BackendWork(work, finish, self._completer, outputs, self._seconds(opts))
        if self._coalesced is not None:
            self._coalesced.append(begun)
        return begun

    def _joined(self, works: list[BackendWork], opts: Any, outputs: Any, finish: Finish | None = None) -> BackendWork:
        return BackendWork(Joined(works), finish, self._completer, outputs, self._seconds(opts)) if works else ended(self._completer)

    def _seconds(self, opts: Any) -> float:
        timeout = getattr(opts, "timeout", None)
        return (timeout if timeout is not None and timeout.total_seconds() > 0 else self._timeout).total_seconds()


def _reduction(opts: Any) -> Op | Callable[..., Tensor]:
    op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
    for known, name in REDUCTIONS.items():
        if op == known:
            return name
    for known, function in BITWISE.items():
        if op == known:
            return function
    raise UsageError(f"{op} is not a reduction of the backend paceline; there are {', '.join(map(str, (*REDUCTIONS, *BITWISE)))}")


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def _copy_all(outs: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    for out, part in zip(outs, parts, strict=True):
        out.copy_(part.view(out.shape))
