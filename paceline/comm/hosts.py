"""The group over several hosts: one copy per host crosses the network, whichever way ranks are dealt over hosts.

    host 0   ranks 0 2   sum ─┐ leader 0 ──┐               chunk   0    1    2    3
    host 1   ranks 1 3   sum ─┘ leader 1 ──┴─ all-reduce   inside  ██   ██   ██   ██
                                                           between   ████ ████ ████ ████
    and each leader hands the result out on its host       out             █    █    █    █

Tensors are cut into chunks that follow each other through the three stages, so that the network, which is the slowest, never waits.
Two threads of each rank do it, one sums and the other hands out, so that the next tensor is summed while the one before is on the
network; each has a group of its own inside the host, in which it alone decides the order. `all_reduce` returns at once.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from paceline.comm import fingerprint, reduction
from paceline.comm.collectives import Trusting
from paceline.comm.group import Group, Op, Traffic, Unchecked, Work
from paceline.comm.memory import fresh
from paceline.comm.watch import fine_timer
from paceline.errors import DeadlineExceeded, PacelineError, UsageError, ViewChanged
from paceline.trace import Trace

NARROW, WIDE = 128 << 10, 512 << 10  # elements that go through the stages together: at both ends, and between
AHEAD = 2 << 20  # elements that may be between the threads, on the network
TICK = 0.1  # seconds after which a wait looks up


def cut(numel: int) -> list[tuple[int, int]]:
    """(start, stop) of the chunks: narrow at both ends, where one stage works alone; wide between, as every chunk costs some waits."""
    if not numel:
        return []
    width, front, back = NARROW, [0], [numel]
    while width < WIDE and back[-1] - front[-1] > 4 * width:
        front.append(front[-1] + width)
        back.append(back[-1] - width)
        width *= 2
    edges = [*front, *range(front[-1] + width, back[-1], width), *reversed(back)]
    return list(pairwise(edges))


@runtime_checkable
class Ending(Protocol):
    """A group that can end on all ranks with an error of the caller's."""

    def end(self, error: PacelineError) -> PacelineError:
        """End everything under way with `error`, or with that of the rank that was first; gives that."""
        ...


@runtime_checkable
class Checking(Protocol):
    """A group that compares calls in one short message."""

    def check(self, call: fingerprint.Call) -> object:
        """Raise `Mismatch` on all ranks if they are not about to make the same call."""
        ...


class _Job:
    """Something the threads do in its turn, and its Work: `begin` does it all, unless there is `conclude`, which ends a reduction."""

    def __init__(self, begin: Callable[[], Any], conclude: Callable[[], Any] | None, what: str, deadline: float) -> None:
        self.begin, self.conclude, self.what, self.deadline = begin, conclude, what, deadline
        self._ended = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def end(self, result: Any) -> None:
        """It has been done."""
        if not self._ended.is_set():
            self._result = result
            self._ended.set()

    def void(self, error: BaseException) -> None:
        """It will not be done."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()

    def wait(self, timeout: float | None = None) -> Any:
        limit = time.monotonic() + (self.deadline if timeout is None else timeout)
        while not self._ended.wait(TICK):
            if time.monotonic() > limit:
                raise DeadlineExceeded(f"{self.what} has not ended within {self.deadline if timeout is None else timeout:g} s")
        if self._error is not None:
            raise self._error
        return self._result

    def done(self) -> bool:
        return self._ended.is_set()

    def exception(self) -> BaseException | None:
        return self._error if self._ended.is_set() else None


class _Chunk(NamedTuple):
    """What is between the hosts, where it ends, and since when (nanoseconds); no work on those that don't lead their host."""

    job: _Job
    op: Op
    end: Tensor
    room: Tensor
    begun: int
    work: Work[Tensor] | None


class _Crossing:
    """What is between the two threads, in order: chunks, at most AHEAD elements of them, and the ends of jobs."""

    def __init__(self) -> None:
        self._items = deque[_Chunk | _Job | None]()
        self._elements = 0
        self._changed = threading.Condition()

    def put(self, item: _Chunk | _Job | None) -> None:
        """Wait for room, and append."""
        elements = item.room.numel() if isinstance(item, _Chunk) else 0
        with self._changed:
            self._changed.wait_for(lambda: not elements or not self._elements or self._elements + elements <= AHEAD)
            self._elements += elements
            self._items.append(item)
            self._changed.notify_all()

    def first(self) -> _Chunk | _Job | None:
        """Wait for one; it stays, and counts, until `drop`."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._items))
            return self._items[0]

    def drop(self) -> None:
        """The first has been dealt with."""
        with self._changed:
            item = self._items.popleft()
            self._elements -= item.room.numel() if isinstance(item, _Chunk) else 0
            self._changed.notify_all()


class HostsGroup:
    """The workers of several hosts (a `Group`).

    `inner`: those of my host; `outer`: the first of each host, None on the others; `flat`: all of them, for everything but all-reduce.
    `hosts`: the host of each rank. Takes charge of all three groups. `trace` is told when chunks are summed and handed out `within` the
    host, and how long the leaders have them `between` hosts.
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
            raise UsageError(f"hosts has {len(self.hosts)} entries for {self.size} ranks; give the host of each rank")
        self.trace = Trace(0) if trace is None else trace
        self._deadline = 2 * deadline  # a backstop: the groups beneath find out who is missing
        self._hands = inner.sub(range(inner.size)) if inner.size > 1 else None  # in which sums are handed out
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._crossing = _Crossing()
        self._pending: deque[_Job] = deque()
        self._broken: BaseException | None = None
        self._threads = [
            threading.Thread(target=work, name=f"paceline hosts {name}", daemon=True)
            for name, work in (("sum", self._sum), ("hand out", self._hand_out))
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)  # a thread that is inside torch while Python ends takes the process down with it

    @property
    def traffic(self) -> Traffic:
        """Bytes sent through all groups."""
        groups = [group for group in (self.inner, self._hands, self.outer, self.flat) if group is not None]
        return Traffic(sum(group.traffic.within for group in groups), sum(group.traffic.between for group in groups))

    @property
    def waited(self) -> float:
        """Seconds spent waiting for ranks that came later, to an agreement or a compared call."""
        return self.flat.waited

    # ---- the threads

    def _sum(self) -> None:
        torch.set_num_threads(1)
        fine_timer()
        while (job := self._jobs.get()) is not None:
            self._attempt(job, job.begin, last=job.conclude is None)
            if job.conclude is not None:
                self._crossing.put(job)
        self._crossing.put(None)

    def _hand_out(self) -> None:
        torch.set_num_threads(1)
        fine_timer()
        while (item := self._crossing.first()) is not None:
            if isinstance(item, _Chunk):
                self._attempt(item.job, partial(self._land, item))
            elif item.conclude is not None:
                self._attempt(item, item.conclude, last=True)
            self._crossing.drop()

    def _attempt(self, job: _Job, act: Callable[[], Any], *, last: bool = False) -> None:
        """Do a part of a job; an error is kept for whoever waits: one that ends the group as `_spread` gives it, the same on all ranks."""
        if self._broken is not None:
            job.void(self._broken)
        if job.done():
            return
        try:
            result = act()
        except (UsageError, RuntimeError, ValueError, TypeError) as error:
            job.void(error)
        except PacelineError as error:
            job.void(self._spread(error))
        else:
            if last:
                job.end(result)

    def _spread(self, error: PacelineError) -> BaseException:
        """Tell all ranks, as most know nothing of an error inside one host, and end what they wait for. Gives the first one's error."""
        if self._broken is None:
            self._broken = self.flat.end(error) if isinstance(self.flat, Ending) else error
            for group in (self.outer, self.inner, self._hands):
                if group is not None:
                    group.abort()
        return self._broken

    def _start(self, job: _Job) -> Work[Any]:
        if self._broken is not None:
            raise self._broken
        while self._pending and self._pending[0].done():
            self._pending.popleft()
        self._pending.append(job)
        self._jobs.put(job)
        return job

    # ---- reductions

    def all_reduce(self, x: Tensor, *, op: Op = "sum", name: str | None = None, out: Tensor | None = None) -> Work[Tensor]:
        """See `Group.all_reduce`."""
        call = fingerprint.reducing("all_reduce", x, op, name, out)
        if isinstance(self.flat, Checking):
            self.flat.check(call)
        else:
            fingerprint.compare([(text, flaw) for text, flaw in self.flat.gather_objects([str(call), call.flaw], name="all_reduce")])
        return self.all_reduce_agreed(x, op=op, out=out)

    def all_reduce_agreed(self, x: Tensor, *, op: Op = "sum", out: Tensor | None = None) -> Work[Tensor]:
        """`all_reduce` of what all ranks are known to agree on."""
        reduction.admit(op, x.dtype)
        x = x.detach()
        target = fresh(x.shape, x.dtype) if out is None else out.detach()
        straight = target.is_contiguous()
        flat = target.view(-1) if straight else fresh((x.numel(),), x.dtype)

        def begin() -> None:
            source = x.reshape(-1)
            if reduction.crossing(source, flat):
                source = source.clone()
            self._send(job, source, flat, op)

        def conclude() -> Tensor:
            if not straight:
                target.copy_(flat.view(x.shape))
            return target if out is None else out

        job = _Job(begin, conclude, f"all_reduce of {x.numel()} elements over {len(set(self.hosts))} hosts", self._deadline)
        return self._start(job)

    def _send(self, job: _Job, source: Tensor, flat: Tensor, op: Op) -> None:
        """Send `source` on its way into `flat`, chunk after chunk; halves are added, and travel, in float32."""
        held, added = reduction.wide(source.dtype, op), cast("Op", "sum" if op == "mean" else op)
        for start, stop in cut(flat.numel()):
            mine, end = source[start:stop], flat[start:stop]
            room = end if held == flat.dtype else torch.empty(stop - start, dtype=held)
            self._gather(mine, room, added)
            self._crossing.put(_Chunk(job, op, end, room, time.perf_counter_ns(), self._cross(room, added)))

    def _gather(self, mine: Tensor, room: Tensor, op: Op) -> None:
        """The sum of my host, in `room` of its ranks."""
        if mine.dtype != room.dtype or (self.inner.size == 1 and mine.data_ptr() != room.data_ptr()):
            mine = room.copy_(mine)
        if self.inner.size > 1:
            with self.trace.span("sum", "within"):
                self.inner.all_reduce(mine, op=op, out=room).wait()

    def _cross(self, chunk: Tensor, op: Op) -> Work[Tensor] | None:
        """The leaders' exchange of a chunk, under way."""
        if self.outer is None:
            return None
        if isinstance(self.outer, Unchecked):
            return self.outer.all_reduce_agreed(chunk, op=op, out=chunk)
        return self.outer.all_reduce(chunk, op=op, out=chunk)

    def _land(self, chunk: _Chunk) -> None:
        """Wait for a chunk from the network, and hand it out."""
        if chunk.work is not None:
            chunk.work.wait()
            self.trace.record("all-reduce", "between", chunk.begun, time.perf_counter_ns())
        if self._hands is not None:
            with self.trace.span("hand out", "within"):
                self._hands.broadcast(chunk.room, root=0).wait()
        reduction.finish(chunk.op, chunk.room, self.size)
        if chunk.room is not chunk.end:
            chunk.end.copy_(chunk.room)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Group.empty`: registered with the group of my host."""
        tensor: Tensor = self._start(_Job(lambda: self.inner.empty(shape, dtype), None, "empty", self._deadline)).wait()
        return tensor

    def release(self, x: Tensor) -> None:
        """Forget registered memory."""
        release = getattr(self.inner, "release", None)
        if release is not None and self._broken is None:
            self._start(_Job(lambda: release(x), None, "release", self._deadline)).wait()

    # ---- everything else goes over all ranks at once

    def reduce_scatter(self, x: Tensor, *, op: Op = "sum", name: str | None = None) -> Work[Tensor]:
        """See `Group.reduce_scatter`."""
        return self.flat.reduce_scatter(x, op=op, name=name)

    def exchange(self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]], *, tag: int = 0) -> Work[None]:
        """See `Group.exchange`."""
        return self.flat.exchange(sends, recvs, tag=tag)

    def exchange_agreed(self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]], *, tag: int = 0) -> Work[None]:
        """`exchange` without comparing first, where the network can."""
        exchange = self.flat.exchange_agreed if isinstance(self.flat, Trusting) else self.flat.exchange
        return exchange(sends, recvs, tag=tag)

    def all_gather(self, x: Tensor, *, name: str | None = None) -> Work[list[Tensor]]:
        """See `Group.all_gather`."""
        return self.flat.all_gather(x, name=name)

    def broadcast(self, x: Tensor, *, root: int = 0, name: str | None = None) -> Work[Tensor]:
        """See `Group.broadcast`."""
        return self.flat.broadcast(x, root=root, name=name)

    def all_to_all(self, xs: Sequence[Tensor], *, name: str | None = None) -> Work[list[Tensor]]:
        """See `Group.all_to_all`."""
        return self.flat.all_to_all(xs, name=name)

    def barrier(self, *, name: str | None = None) -> Work[None]:
        """See `Group.barrier`."""
        return self.flat.barrier(name=name)

    def gather_objects(self, obj: Any, *, name: str | None = None) -> list[Any]:
        """See `Group.gather_objects`."""
        return self.flat.gather_objects(obj, name=name)

    def agree(self, payload: bytes) -> list[bytes]:
        """See `Group.agree`."""
        return self.flat.agree(payload)

    def sub(self, ranks: Sequence[int]) -> Group | None:
        """See `Group.sub`: over the network, on one host too."""
        return self.flat.sub(ranks)

    def global_rank(self, rank: int) -> int:
        """See `Group.global_rank`."""
        return self.flat.global_rank(rank)

    def close(self) -> None:
        """See `Group.close`."""
        self._end(ViewChanged("this group has been closed"), lambda group: group.close())

    def abort(self) -> None:
        """See `Group.abort`."""
        self._end(ViewChanged("this group has been aborted"), lambda group: group.abort())

    def _end(self, error: ViewChanged, end: Callable[[Group], None]) -> None:
        if isinstance(self._broken, ViewChanged):
            return
        atexit.unregister(self.close)
        idle = all(job.done() for job in self._pending)
        self._broken = error
        self._jobs.put(None)
        for job in self._pending:
            job.void(error)
        if idle:
            self._join()
        for group in (self.outer, self.inner, self._hands, self.flat):
            if group is not None:
                end(group)
        self._join()

    def _join(self) -> None:
        for thread in self._threads:
            if threading.current_thread() is not thread:
                thread.join(1.0)
