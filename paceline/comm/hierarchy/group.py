"""The group over several hosts: one copy per host crosses the network, whichever way ranks are
dealt over hosts.

    host 0   ranks 0 2   sum ─┐ leader 0 ──┐               chunk   0    1    2    3
    host 1   ranks 1 3   sum ─┘ leader 1 ──┴─ all-reduce   inside  ██   ██   ██   ██
                                                           between   ████ ████ ████ ████
    and each leader hands the result out on its host       out             █    █    █    █

Tensors follow each other through the three stages, large ones in chunks, so that the network, which
is the slowest, never waits. Two threads of each rank do it, one sums and the other hands out, so
that the next tensor is summed while the one before is on the network; each has a group of its own
inside the host, in which it alone decides the order. `all_reduce` returns at once.

What is gathered and what is scattered goes the same way through the threads, by `rails`, where all
hosts have as many workers.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from paceline.at_exit import at_exit
from paceline.comm import fingerprint, reduction
from paceline.comm.collectives import (
    TAG,
    GeneratorWork,
    UncheckedExchange,
    all_gather,
    all_reduce_agreed,
)
from paceline.comm.group import (
    Group,
    Op,
    Traffic,
    UncheckedAllReduce,
    UncheckedReduceScatter,
    Work,
    pieces,
)
from paceline.comm.hierarchy.chunks import WIDTH, cut
from paceline.comm.hierarchy.executor import Flow, StagedExecutor, StagedJob, Steps
from paceline.comm.hierarchy.rails import SMALL, Rails, even
from paceline.comm.schedule import Schedule
from paceline.comm.shm.group import SharedGroup
from paceline.comm.shm.memory import fresh
from paceline.comm.shm.messages import plain
from paceline.errors import Mismatch, PacelineError, UsageError, ViewChanged
from paceline.trace import Trace

SHORT = WIDTH  # elements of a tensor that the thread which waits for it takes through all stages
CROSSINGS = 1 << 12  # exchanges by a schedule that may be under way at a time
# tags of what all ranks gather at once begin here: those of the network's own calls are below
GATHERS = 1 << 21
# starts the sum of what the ranks of a host have, in a tensor of each
HostSum = Callable[[Tensor, Tensor, Op], Work[Tensor]]


@runtime_checkable
class EndsTogether(Protocol):
    """A group that the caller can end on all ranks with an error of its own."""

    def end(self, error: PacelineError) -> PacelineError:
        """End everything under way with `error`, or with that of the rank that was first; return
        that.
        """
        ...


@runtime_checkable
class ComparesCalls(Protocol):
    """A group that compares calls in one short message."""

    def check(self, call: fingerprint.CallFingerprint, extra: bytes = b"") -> list[bytes]:
        """Raise `Mismatch` on all ranks if they are not about to make the same call; return
        every rank's `extra`.
        """
        ...


class HostsGroup:
    """The workers of several hosts (a `Group`).

    `inner`: the workers of this host; `outer`: the first of each host, None on the others; `flat`:
    all, for what doesn't go by hosts. `hosts`: the host of each rank. Takes charge of all three
    groups. `trace` is told when chunks are summed and handed out `within` the host, and how long
    they are `between` hosts.
    """

    def __init__(
        self,
        inner: Group,
        outer: Group | None,
        flat: Group,
        hosts: Sequence[int],
        *,
        deadline: float = 120.0,
        trace: Trace | None = None,
    ) -> None:
        self.rank, self.size, self.view = flat.rank, flat.size, flat.view
        self.inner, self.outer, self.flat, self.hosts = inner, outer, flat, tuple(hosts)
        if len(self.hosts) != self.size:
            raise UsageError(
                f"hosts has {len(self.hosts)} entries for {self.size} ranks; "
                "give the host of each rank"
            )
        self.trace, self.deadline = Trace(0) if trace is None else trace, deadline
        # exchanges by a schedule, and gathers by all at once, as far as their tags tell
        self._crossings = self._gathers = 0
        self._deadline = 2 * deadline  # a backstop: the groups beneath find out who is missing
        # in which sums are handed out
        self._hands = inner.sub(range(inner.size)) if inner.size > 1 else None
        if isinstance(inner, SharedGroup) and isinstance(self._hands, SharedGroup):
            self._hands.reach(inner)
        self._rails: Rails | None = None  # which all ranks have, or none
        self._line = StagedExecutor("hosts", 2, self._spread)
        # a thread that is inside torch while Python ends takes the process down with it
        self._unregister = at_exit(self.close)

    @property
    def _parts(self) -> list[Group]:
        """All groups but `flat`."""
        rail = None if self._rails is None else self._rails.rail
        return [group for group in (self.outer, rail, self.inner, self._hands) if group is not None]

    @property
    def traffic(self) -> Traffic:
        """Bytes sent through all groups."""
        return sum((group.traffic for group in (*self._parts, self.flat)), Traffic())

    @property
    def waited(self) -> float:
        """Seconds spent waiting for ranks that came later, to an agreement or a compared call."""
        return self.flat.waited

    def _spread(self, error: PacelineError) -> BaseException:
        """Tell all ranks of `error` (most know nothing of an error inside one host), and end
        their waits. Returns the first one.
        """
        first = self.flat.end(error) if isinstance(self.flat, EndsTogether) else error
        for group in self._parts:
            group.abort()
        return first

    def _compare(self, call: fingerprint.CallFingerprint, rows: int = 0) -> list[int]:
        """Compare `call` with all ranks, and return every rank's number of rows."""
        if isinstance(self.flat, ComparesCalls):
            return [
                struct.unpack("<q", answer)[0]
                for answer in self.flat.check(call, struct.pack("<q", rows))
            ]
        told = self.flat.gather_objects([str(call), call.flaw, rows], name=call.kind)
        fingerprint.compare([(text, flaw) for text, flaw, _ in told])
        return [count for _, _, count in told]

    # ---- reductions

    def all_reduce(
        self, x: Tensor, *, op: Op = "sum", name: str | None = None, out: Tensor | None = None
    ) -> Work[Tensor]:
        self._compare(fingerprint.reducing("all_reduce", x, op, name, out))
        return self.all_reduce_agreed(x, op=op, out=out)

    def all_reduce_moving(self, x: Tensor, *, op: Op = "sum", may_move: bool) -> Work[Tensor]:
        """Reduce in place.

        The memory of `x` is moved to where all ranks of this host reach it, if all of them allow
        that.
        """
        self._compare(fingerprint.reducing("all_reduce", x, op, None, x))
        return self._reduce(x, op, x, may_move=may_move)

    def all_reduce_agreed(
        self,
        x: Tensor,
        *,
        op: Op = "sum",
        out: Tensor | None = None,
        across: Schedule | None = None,
        soon: bool = False,
    ) -> Work[Tensor]:
        """Reduce as `all_reduce` does what all ranks are known to agree on.

        `across`: the schedule between hosts, the same on all ranks. `soon`: this rank will do
        nothing more before it waits for the result.
        """
        return self._reduce(x, op, out, across=across, soon=soon)

    def _reduce(
        self,
        x: Tensor,
        op: Op,
        out: Tensor | None,
        *,
        across: Schedule | None = None,
        soon: bool = False,
        may_move: bool | None = None,
    ) -> Work[Tensor]:
        """Reduce what all ranks agree on.

        `may_move`: whether the memory of `x` may move, where all reduce in place in a moving call.
        """
        reduction.admit(op, x.dtype)
        x = x.detach().resolve_conj().resolve_neg()
        target = fresh(x.shape, x.dtype) if out is None else out.detach()
        straight = plain(target)
        flat = target.view(-1) if straight else fresh((x.numel(),), x.dtype)
        held, added = reduction.wide(x.dtype, op), cast("Op", "sum" if op == "mean" else op)

        def flows() -> Iterator[Flow]:
            source = x.reshape(-1)
            if reduction.crossing(source, flat):
                source = source.clone()
            moving = (
                may_move is not None and held == x.dtype and isinstance(self.inner, SharedGroup)
            )
            for start, stop in cut(flat.numel()):
                mine, end = source[start:stop], flat[start:stop]
                inside = (
                    partial(self._sum_there, flat if may_move and straight and not start else None)
                    if moving
                    else self._sum
                )
                yield Flow(self._chunk(mine, end, (held, op, added), inside, across), stop - start)

        def conclude() -> Tensor:
            if not straight:
                target.copy_(flat.view(x.shape))
            return target if out is None else out

        what = f"all_reduce of {x.numel()} elements over {len(set(self.hosts))} hosts"
        return self._line.start(
            StagedJob(flows, conclude, what, self._deadline, () if out is None else [out]),
            soon=soon and flat.numel() <= SHORT,
        )

    def _chunk(
        self,
        mine: Tensor,
        end: Tensor,
        how: tuple[torch.dtype, Op, Op],
        inside: HostSum,
        across: Schedule | None,
    ) -> Steps:
        """Take a chunk from `mine` to `end` through the stages; halves are added, and travel, in
        float32.
        """
        held, op, added = how
        room = end if held == end.dtype else torch.empty(end.numel(), dtype=held)
        if self.inner.size > 1:
            with self.trace.span("sum", "within"):
                inside(room.copy_(mine) if mine.dtype != room.dtype else mine, room, added).wait()
        elif mine.data_ptr() != room.data_ptr():
            room.copy_(mine)
        begun, crossing = time.perf_counter_ns(), self._cross(room, added, across)
        yield crossing
        if crossing is not None:
            self.trace.record("all-reduce", "between", begun, time.perf_counter_ns())
        if self._hands is not None:
            with self.trace.span("hand out", "within"):
                self._hands.broadcast(room, root=0).wait()
        reduction.finish(op, room, self.size)
        if room is not end:
            end.copy_(room)

    def _sum(self, mine: Tensor, room: Tensor, op: Op) -> Work[Tensor]:
        """Sum the parts of this host, in `room` of its ranks."""
        return self.inner.all_reduce(mine, op=op, out=room)

    def _sum_there(self, whole: Tensor | None, mine: Tensor, room: Tensor, op: Op) -> Work[Tensor]:
        """Sum the parts of this host where they lie; `whole` is what moves before, if it may, of
        which `mine` is the first part.
        """
        assert isinstance(self.inner, SharedGroup)
        if mine.data_ptr() != room.data_ptr():
            room.copy_(mine)
        return self.inner.all_reduce_moving(room, op=op, may_move=whole is not None, whole=whole)

    def _cross(self, chunk: Tensor, op: Op, across: Schedule | None) -> Work[Tensor] | None:
        """Start the leaders' exchange of a chunk."""
        if self.outer is None:
            return None
        if across is not None:  # several are under way: each has tags of its own
            self._crossings = (self._crossings + 1) % CROSSINGS
            tag = TAG + self._crossings * len(across.rounds)
            return all_reduce_agreed(self.outer, chunk, across, op, out=chunk, tag=tag)
        if isinstance(self.outer, UncheckedAllReduce):
            return self.outer.all_reduce_agreed(chunk, op=op, out=chunk)
        return self.outer.all_reduce(chunk, op=op, out=chunk)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate memory registered with this host's group."""
        tensor: Tensor = self._in_turn(lambda: self.inner.empty(shape, dtype), "empty")
        return tensor

    def stand_in(self, x: Tensor) -> None:
        stand_in = getattr(self.inner, "stand_in", None)
        if stand_in is not None:
            self._in_turn(lambda: stand_in(x), "stand in")

    def release(self, x: Tensor) -> None:
        """Forget registered memory."""
        release = getattr(self.inner, "release", None)
        if release is not None and self._line.broken is None:
            self._in_turn(lambda: release(x), "release")

    def _in_turn(self, act: Callable[[], Any], what: str) -> Any:
        """Run `act` in this host's group after the sums that were started before."""
        results: list[Any] = []

        def flows() -> Sequence[Flow]:
            results.append(act())
            return ()

        return self._line.start(StagedJob(flows, lambda: results[0], what, self._deadline)).wait()

    # ---- rails

    def connect(self) -> None:
        """Lay the rails, where hosts are even.

        Collective; compared calls do it when they first need them, others don't wait for it.
        """
        if self._rails is None and self._hands is not None and even(self.hosts):
            self._rails = Rails.lay(self.flat, self.inner, self._hands, self.hosts, self.trace)

    def _rails_for(self, x: Tensor, nbytes: int, *, compared: bool) -> Rails | None:
        """Return the rails, if there are any, where they are quicker for pieces of so many
        bytes.
        """
        if nbytes < SMALL or x.device.type != "cpu":
            return None
        if compared:
            self.connect()
        return self._rails

    def reduce_scatter(self, x: Tensor, *, op: Op = "sum", name: str | None = None) -> Work[Tensor]:
        self._compare(fingerprint.reducing("reduce_scatter", x, op, name))
        return self._reduce_scatter(x, op, None, compared=True)

    def reduce_scatter_into(
        self, x: Tensor, out: Tensor, *, op: Op = "sum", name: str | None = None
    ) -> Work[Tensor]:
        """Reduce `x` and write piece `rank` to `out`, contiguous and 1-D, as long as `pieces`
        says.
        """
        self._compare(fingerprint.reducing("reduce_scatter", x, op, name))
        return self._reduce_scatter(x, op, out, compared=True)

    def reduce_scatter_agreed(self, x: Tensor, *, op: Op = "sum") -> Work[Tensor]:
        """Reduce without comparing first, where the network can. Over hosts once rails are laid."""
        return self._reduce_scatter(x, op, None, compared=False)

    def _reduce_scatter(
        self, x: Tensor, op: Op, out: Tensor | None, *, compared: bool
    ) -> Work[Tensor]:
        reduction.admit(op, x.dtype)
        rails = self._rails_for(x, x.numel() * x.element_size() // self.size, compared=compared)
        if rails is None:
            flat = self.flat
            found = (
                flat.reduce_scatter_agreed(x, op=op)
                if isinstance(flat, UncheckedReduceScatter)
                else flat.reduce_scatter(x, op=op)
            )
            return found if out is None else _written(found, [out], out)
        start, stop = pieces(x.numel(), self.size)[self.rank]
        piece = fresh((stop - start,), x.dtype) if out is None else out
        what = f"reduce_scatter of {x.numel()} elements over {len(set(self.hosts))} hosts"
        return self._line.start(
            StagedJob(
                lambda: rails.reduce(x, piece, op), lambda: piece, what, self._deadline, [piece]
            )
        )

    def all_gather(self, x: Tensor, *, name: str | None = None) -> Work[list[Tensor]]:
        return self._all_gather(x, None, name)

    def all_gather_into(
        self, x: Tensor, outs: Sequence[Tensor], *, name: str | None = None
    ) -> Work[list[Tensor]]:
        """Gather every rank's `x` into `outs`, one contiguous tensor for each rank, of the shape
        and dtype of `x`.
        """
        return self._all_gather(x, list(outs), name)

    def _all_gather(
        self, x: Tensor, outs: list[Tensor] | None, name: str | None
    ) -> Work[list[Tensor]]:
        call = fingerprint.rows("all_gather", x, name)
        rows = self._compare(call, x.shape[0] if x.dim() else 0)
        alike = len(set(rows)) == 1
        if outs is not None and not alike:
            told = ", ".join(map(str, rows))
            raise Mismatch(
                f"{call}: ranks bring {told} rows; bring as many on each, as results go to tensors "
                "of one shape"
            )
        rails = self._rails_for(x, x.numel() * x.element_size(), compared=True) if alike else None
        if rails is None:
            return self._gather_flat(
                x, [(count, *x.shape[1:]) if x.dim() else () for count in rows], outs
            )
        places = [fresh(x.shape, x.dtype) for _ in rows] if outs is None else outs
        what = f"all_gather of {x.numel()} elements over {len(set(self.hosts))} hosts"
        return self._line.start(
            StagedJob(lambda: rails.gather(x, places), lambda: places, what, self._deadline, places)
        )

    def _gather_flat(
        self, x: Tensor, shapes: Sequence[Sequence[int]], outs: list[Tensor] | None
    ) -> Work[list[Tensor]]:
        """Gather from all ranks at once, which have agreed on it."""
        self._gathers = (self._gathers + 1) % CROSSINGS
        work = all_gather(self.flat, x, shapes, tag=GATHERS + self._gathers)
        return work if outs is None else _written(work, outs, outs)

    # ---- everything else goes over all ranks at once

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        *,
        tag: int = 0,
    ) -> Work[None]:
        return self.flat.exchange(sends, recvs, tag=tag)

    def exchange_agreed(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        *,
        tag: int = 0,
    ) -> Work[None]:
        """Exchange without comparing first, where the network can."""
        exchange = (
            self.flat.exchange_agreed
            if isinstance(self.flat, UncheckedExchange)
            else self.flat.exchange
        )
        return exchange(sends, recvs, tag=tag)

    def broadcast(self, x: Tensor, *, root: int = 0, name: str | None = None) -> Work[Tensor]:
        return self.flat.broadcast(x, root=root, name=name)

    def all_to_all(self, xs: Sequence[Tensor], *, name: str | None = None) -> Work[list[Tensor]]:
        return self.flat.all_to_all(xs, name=name)

    def barrier(self, *, name: str | None = None) -> Work[None]:
        return self.flat.barrier(name=name)

    def gather_objects(self, obj: Any, *, name: str | None = None) -> list[Any]:
        return self.flat.gather_objects(obj, name=name)

    def agree(self, payload: bytes) -> list[bytes]:
        return self.flat.agree(payload)

    def sub(self, ranks: Sequence[int]) -> Group | None:
        """Make the group of these ranks, over the network even if all are on one host."""
        return self.flat.sub(ranks)

    def global_rank(self, rank: int) -> int:
        return self.flat.global_rank(rank)

    def close(self) -> None:
        self._end(ViewChanged("this group has been closed"), lambda group: group.close())

    def abort(self) -> None:
        self._end(ViewChanged("this group has been aborted"), lambda group: group.abort())

    def _end(self, error: ViewChanged, end: Callable[[Group], None]) -> None:
        def let_go() -> None:
            for group in (*self._parts, self.flat):
                end(group)

        if self._line.finish(error, let_go):
            self._unregister()
        else:
            let_go()  # groups that were aborted are closed after it


def _written(work: Work[Any], outs: list[Tensor], result: Any) -> Work[Any]:
    """Return the Work that copies what `work` gives to `outs`, and gives `result`."""

    def steps() -> Generator[Work[Any], None, Any]:
        yield work
        found = work.wait()
        for out, part in zip(outs, [found] if isinstance(found, Tensor) else found, strict=True):
            out.detach().copy_(part)
        return result

    return GeneratorWork(steps(), outs)
