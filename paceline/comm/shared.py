"""The group inside one host: tensors in shared memory, a barrier of counters, and torch's own vector operations on slices.

Every cell of the segment has one writer. A rank *posts* by raising its counter, and waits until all counters have come up to it.
On x86-64 stores become visible in program order, so what was written before the counter is there when the counter is seen.

An operation is a generator that yields whenever it has posted and the others have to come. Nobody sits in it: whoever waits for
anything pushes all pending operations forward. The operations of a group end in the order in which they began.

    all-reduce of registered memory, 2 ranks              of ordinary tensors (per block, halves of the stage in turn)

    rank 0  post . a0 += b0, b0 = a0 . post               rank 0  stage x1 . post . stage x0 + peer's . post . copy half 1
    rank 1  post . a1 += b1, b0 = a1 . post               rank 1  stage x0 . post . stage x1 + peer's . post . copy half 0
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import msgpack
import torch
from torch import Tensor

from paceline.comm.board import SMALL, STAGE, Board
from paceline.comm.fingerprint import Call, choosing, compare, dealing, digest, reducing, rooted, rows
from paceline.comm.group import Group, Op, Traffic, Work, pieces
from paceline.comm.memory import Segment
from paceline.comm.reduction import admit, combine, finish, wide
from paceline.errors import Mismatch, PacelineError, UsageError, ViewChanged

BLOCK = 64 << 10  # elements of registered memory that are summed and handed out at a time
ALL = -1  # a message to everybody
Steps = Generator[None, None, Any]


class _Pending:
    """An operation under way in a SharedGroup."""

    def __init__(self, group: SharedGroup, steps: Steps, what: str) -> None:
        self.group, self.steps, self.what = group, steps, what
        self.target = 0  # all counters have to come up to it before the next stretch
        self.ended = False
        self.result: Any = None
        self.error: BaseException | None = None

    def wait(self, timeout: float | None = None) -> Any:
        if not self.ended:
            self.group._finish(self, timeout)
        if self.error is not None:
            raise self.error
        return self.result

    def done(self) -> bool:
        if not self.ended:
            self.group._push()
        return self.ended

    def exception(self) -> BaseException | None:
        return self.error if self.done() else None


class _Registered(NamedTuple):
    segment: Segment
    start: int  # address of the first byte of my region
    region: int  # bytes of a rank's region
    regions: list[Tensor]  # uint8, one a rank


class SharedGroup:
    """The workers of one host, exchanging CPU tensors through shared memory (a `Group`).

    `board` is the mapped control segment of this group; `SharedGroup.from_store` makes it.
    """

    def __init__(self, board: Board, *, view: int = 0, ranks: Sequence[int] | None = None) -> None:
        self.board = board
        self.rank, self.size, self.view = board.rank, board.size, view
        self.traffic = Traffic()
        self._ranks = tuple(ranks) if ranks is not None else tuple(range(board.size))
        self._queue: deque[_Pending] = deque()
        self._lock = threading.Lock()
        self._posted = 0
        self._count = 0
        self._marks: dict[Call, int] = {}
        self._registered: dict[int, _Registered] = {}
        self._plans: dict[tuple[Any, ...], list[list[Tensor]]] = {}
        self._broken: BaseException | None = None
        board.busy = self._push

    @classmethod
    def from_store(
        cls,
        store: Any,
        rank: int,
        size: int,
        *,
        deadline: float = 120.0,
        view: int = 0,
        folder: str | None = None,
        ranks: Sequence[int] | None = None,
    ) -> SharedGroup:
        """Meet over a store (`put(key, obj)`, `take(key, timeout)`); rank 0 makes the segment. `folder`: files there instead of memfd."""
        return cls(Board.from_store(store, rank, size, deadline=deadline, folder=folder), view=view, ranks=ranks)

    @property
    def waited(self) -> float:
        """Seconds spent waiting for ranks that came later."""
        return self.board.waited

    # ---- the engine: pending operations, pushed by whoever waits

    def _start(self, what: str, steps: Steps) -> Work[Any]:
        if self._broken is not None:
            steps.close()
            raise self._broken
        pending = _Pending(self, steps, what)
        with self._lock:
            self._queue.append(pending)
        self._push()
        return pending

    def _push(self) -> None:
        """Advance the oldest operations as far as they go; never blocks."""
        if not self._queue or not self._lock.acquire(blocking=False):
            return
        try:
            while self._queue:
                head = self._queue[0]
                if head.target and not self.board.reached(head.target):
                    return
                try:
                    next(head.steps)
                    head.target = self._posted
                    continue
                except StopIteration as stop:
                    head.result = stop.value
                except (PacelineError, RuntimeError, ValueError, TypeError) as error:
                    head.error = error
                head.ended = True
                self._queue.popleft()
        finally:
            self._lock.release()

    def _finish(self, pending: _Pending, timeout: float | None) -> None:
        self._push()
        if pending.ended:
            return
        try:
            self.board.wait(lambda: self._ended(pending), self._missing, pending.what, timeout)
        except PacelineError as error:
            if self._broken is None:
                self._broken = error
            self._void(error)
            raise

    def _ended(self, pending: _Pending) -> bool:
        head = self._queue[0] if self._queue else None
        if head is not None and self.board.reached(head.target):
            self._push()
        return pending.ended

    def _missing(self) -> list[int]:
        return self.board.behind(self._queue[0].target) if self._queue else []

    def _void(self, error: BaseException) -> None:
        with self._lock:
            for pending in self._queue:
                pending.steps.close()
                pending.error, pending.ended = error, True
            self._queue.clear()

    def _post(self) -> None:
        self._posted += 1
        self.board.post(self._posted)

    def _meet(self, call: Call, meta: Any = None) -> Generator[None, None, list[Any]]:
        """The first phase of each operation: everybody says what it is about to do. Gives every rank's `meta`."""
        mark = self._marks.get(call)
        if mark is None:
            if len(self._marks) > 4096:
                self._marks.clear()
            mark = self._marks[call] = struct.unpack("q", digest(call)[:8])[0]
        parity = self._count & 1
        self._count += 1
        self.board.announce(parity, mark, None if meta is None else msgpack.packb(meta))
        self._post()
        yield
        if call.flaw or not self.board.same(parity, mark):
            self.board.describe(msgpack.packb([str(call)[:400], call.flaw[:400]]))
            self._post()
            yield
            compare([tuple(msgpack.unpackb(text)) for text in self.board.descriptions()])
        return [] if meta is None else [msgpack.unpackb(m) for m in self.board.metas(parity)]

    # ---- reductions

    def all_reduce(self, x: Tensor, *, op: Op = "sum", name: str | None = None, out: Tensor | None = None) -> Work[Tensor]:
        """See `Group.all_reduce`."""
        target = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
        call = reducing("all_reduce", x, op, name, out)
        nbytes = x.numel() * x.element_size()
        self.traffic.within += 2 * nbytes * (self.size - 1) // self.size
        place = self._place(x) if nbytes > SMALL and target.data_ptr() == x.data_ptr() and x.is_contiguous() else None
        if place is None:
            return self._start("all_reduce", self._reduce(x, target, op, call))
        # in place on every rank: that the offsets are the same is part of what is compared
        call = call._replace(detail=f"{call.detail}, registered at {x.data_ptr() - place.start}")
        return self._start("all_reduce", self._reduce_registered(x, place, op, call))

    def _reduce(self, x: Tensor, out: Tensor, op: Op, call: Call) -> Steps:
        nbytes, half = x.numel() * x.element_size(), self._count & 1
        flat = x.detach().reshape(-1) if not call.flaw else x
        if nbytes <= SMALL and not call.flaw:
            self.board.small(self.rank, half, flat.numel(), flat.dtype).copy_(flat)
        yield from self._meet(call)
        _admit(x, op)
        result = out.detach().view(-1) if out.is_contiguous() else torch.empty(x.numel(), dtype=x.dtype)
        if nbytes <= SMALL:
            fold([self.board.small(r, half, flat.numel(), flat.dtype) for r in range(self.size)], result, op)
        else:
            yield from self._sweep(flat, pieces(flat.numel(), self.size), op, result, whole=True)
        if not out.is_contiguous():
            out.detach().copy_(result.view(out.shape))
        return out

    def _sweep(self, x: Tensor, cut: list[tuple[int, int]], op: Op, out: Tensor, *, whole: bool) -> Steps:
        """Reduce each rank's piece on that rank, block by block through the stages; `whole`: hand the pieces to all."""
        board, me, room = self.board, self.rank, STAGE // self.size // 64 * 64  # bytes of the stage for each rank's piece
        width = room // x.element_size()
        longest = max(stop - start for start, stop in cut)
        last: list[tuple[Tensor, Tensor]] = []
        for index, at in enumerate(range(0, longest, width)):
            half = index & 1
            spans = [(min(start + at, stop), min(start + at + width, stop)) for start, stop in cut]
            for r, (start, stop) in enumerate(spans):
                if r != me and stop > start:
                    board.stage(me, half, r * room, stop - start, x.dtype).copy_(x[start:stop])
            for to, source in last:
                to.copy_(source)
            self._post()
            yield
            start, stop = spans[me]
            count = stop - start
            if count:
                mine = board.stage(me, half, me * room, count, x.dtype)
                parts = [x[start:stop] if r == me else board.stage(r, half, me * room, count, x.dtype) for r in range(self.size)]
                fold(parts, mine, op)
                (out[start:stop] if whole else out[at : at + count]).copy_(mine)
            self._post()
            yield
            last = []
            if whole:
                others = ((r, a, b) for r, (a, b) in enumerate(spans) if r != me and b > a)
                last = [(out[a:b], board.stage(r, half, r * room, b - a, x.dtype)) for r, a, b in others]
        for to, source in last:
            to.copy_(source)

    def _reduce_registered(self, x: Tensor, place: _Registered, op: Op, call: Call) -> Steps:
        plan = self._plan(x, place)
        yield from self._meet(call)
        _admit(x, op)
        for parts in plan:
            first, *others = parts
            fold(parts, first, op)
            for other in others:
                other.copy_(first)
        self._post()
        yield
        return x

    def _plan(self, x: Tensor, place: _Registered) -> list[list[Tensor]]:
        """Every rank's view of each block of my piece of `x`."""
        key = (x.data_ptr(), x.numel(), x.dtype)
        plan = self._plans.get(key)
        if plan is None:
            offset, count = x.data_ptr() - place.start, x.numel()
            views = [r[offset : offset + count * x.element_size()].view(x.dtype) for r in place.regions]
            start, stop = ((edge + 15) // 16 * 16 if edge < count else count for edge in pieces(count, self.size)[self.rank])
            plan = [[v[at : min(at + BLOCK, stop)] for v in views] for at in range(min(start, count), min(stop, count), BLOCK)]
            if len(self._plans) >= 256:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    def reduce_scatter(self, x: Tensor, *, op: Op = "sum", name: str | None = None) -> Work[Tensor]:
        """See `Group.reduce_scatter`."""
        self.traffic.within += x.numel() * x.element_size() * (self.size - 1) // self.size

        def steps() -> Steps:
            yield from self._meet(reducing("reduce_scatter", x, op, name))
            _admit(x, op)
            flat = x.detach().reshape(-1)
            cut = pieces(flat.numel(), self.size)
            out = torch.empty(cut[self.rank][1] - cut[self.rank][0], dtype=x.dtype)
            yield from self._sweep(flat, cut, op, out, whole=False)
            return out

        return self._start("reduce_scatter", steps())

    # ---- messages

    def _stream(self, outgoing: list[tuple[int, Tensor]], incoming: list[tuple[int, Tensor]], metas: list[list[list[int]]]) -> Steps:
        """Move messages through the stages, a window at a time. `metas[r]`: [to, nbytes] of each message of rank r, in order."""
        board, window = self.board, STAGE
        expected: dict[int, deque[Tensor]] = {}
        for source, tensor in incoming:
            expected.setdefault(source, deque()).append(tensor)
        arrivals = []  # (source, offset in the source's stream, where it goes)
        for source, messages in enumerate(metas):
            at = 0
            for to, nbytes in messages:
                if to == self.rank or (to == ALL and source != self.rank):
                    into = expected[source].popleft()
                    arrivals.append((source, at, into))
                at += nbytes
        departures, at = [], 0
        for _, tensor in outgoing:
            departures.append((at, tensor))
            at += tensor.numel()
        rounds = -(-max(sum(nbytes for _, nbytes in messages) for messages in metas) // window)
        for index in range(rounds):
            half, low, high = index & 1, index * window, (index + 1) * window
            for start, tensor in departures:
                a, b = max(start, low), min(start + tensor.numel(), high)
                if a < b:
                    board.stage(self.rank, half, a - low, b - a, torch.uint8).copy_(tensor[a - start : b - start])
            self._post()
            yield
            for source, start, tensor in arrivals:
                a, b = max(start, low), min(start + tensor.numel(), high)
                if a < b:
                    tensor[a - start : b - start].copy_(board.stage(source, half, a - low, b - a, torch.uint8))

    def _send(self, outgoing: list[tuple[int, Tensor]]) -> list[list[int]]:
        for to, tensor in outgoing:
            self.traffic.within += tensor.numel() * (self.size - 1 if to == ALL else 1)
        return [[to, tensor.numel()] for to, tensor in outgoing]

    def exchange(self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]], *, tag: int = 0) -> Work[None]:
        """See `Group.exchange`."""

        def steps() -> Steps:
            outgoing = [(to, _bytes(x)) for to, x in sends]
            landing = [(r, x if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)) for r, x in recvs]
            metas = yield from self._meet(Call("exchange", detail=f"tag {tag}"), self._send(outgoing))
            incoming = [(source, _bytes(x)) for source, x in landing]
            self._check_messages(metas, incoming)
            yield from self._stream(outgoing, incoming, metas)
            for (_, x), (_, landed) in zip(recvs, landing, strict=True):
                if landed is not x:
                    x.copy_(landed)

        return self._start("exchange", steps())

    def _check_messages(self, metas: list[list[list[int]]], incoming: list[tuple[int, Tensor]]) -> None:
        for source in range(self.size):
            sent = [nbytes for to, nbytes in metas[source] if to in (self.rank, ALL)]
            awaited = [x.numel() for s, x in incoming if s == source]
            if sent != awaited:
                raise Mismatch(f"rank {self.rank} awaits messages of {awaited} bytes from rank {source}, which sends {sent}")

    def all_gather(self, x: Tensor, *, name: str | None = None) -> Work[list[Tensor]]:
        """See `Group.all_gather`."""

        def steps() -> Steps:
            call = rows("all_gather", x, name)
            outgoing = [(ALL, _bytes(x))] if not call.flaw else []
            metas = yield from self._meet(call, [self._send(outgoing), list(x.shape)])
            _on_cpu(x)
            outs = [x.detach().clone() if r == self.rank else torch.empty(shape, dtype=x.dtype) for r, (_, shape) in enumerate(metas)]
            incoming = [(r, _bytes(out)) for r, out in enumerate(outs) if r != self.rank]
            yield from self._stream(outgoing, incoming, [sent for sent, _ in metas])
            return outs

        return self._start("all_gather", steps())

    def broadcast(self, x: Tensor, *, root: int = 0, name: str | None = None) -> Work[Tensor]:
        """See `Group.broadcast`."""

        def steps() -> Steps:
            call = rooted(x, root, self.size, name)
            landing = x.detach() if call.flaw or x.is_contiguous() else x.detach().contiguous()
            outgoing = [(ALL, _bytes(landing))] if self.rank == root and not call.flaw else []
            metas = yield from self._meet(call, self._send(outgoing))
            _on_cpu(x)
            incoming = [] if self.rank == root else [(root, _bytes(landing))]
            yield from self._stream(outgoing, incoming, metas)
            if landing.data_ptr() != x.data_ptr():
                x.detach().copy_(landing)
            return x

        return self._start("broadcast", steps())

    def all_to_all(self, xs: Sequence[Tensor], *, name: str | None = None) -> Work[list[Tensor]]:
        """See `Group.all_to_all`."""

        def steps() -> Steps:
            call = dealing(xs, self.size, name)
            outgoing = [(to, _bytes(x)) for to, x in enumerate(xs) if to != self.rank] if not call.flaw else []
            metas = yield from self._meet(call, [self._send(outgoing), [list(x.shape) for x in xs]])
            outs = [torch.empty(shapes[self.rank], dtype=xs[0].dtype) for _, shapes in metas]
            outs[self.rank].copy_(xs[self.rank].detach())
            incoming = [(r, _bytes(out)) for r, out in enumerate(outs) if r != self.rank]
            yield from self._stream(outgoing, incoming, [sent for sent, _ in metas])
            return outs

        return self._start("all_to_all", steps())

    def barrier(self, *, name: str | None = None) -> Work[None]:
        """See `Group.barrier`."""

        def steps() -> Steps:
            yield from self._meet(Call("barrier", name))

        return self._start("barrier", steps())

    # ---- the control channel, groups within, memory

    def agree(self, payload: bytes) -> list[bytes]:
        """See `Group.agree`."""
        if self._broken is not None:
            raise self._broken
        return self.board.agree(payload)

    def gather_objects(self, obj: Any, *, name: str | None = None) -> list[Any]:
        """See `Group.gather_objects`."""
        call = str(Call("gather_objects", name))
        answers = [msgpack.unpackb(a, strict_map_key=False) for a in self.agree(msgpack.packb([call, obj]))]
        compare([(text, "") for text, _ in answers])
        return [found for _, found in answers]

    def sub(self, ranks: Sequence[int]) -> Group | None:
        """See `Group.sub`."""
        call = choosing(ranks, self.size)
        compare([tuple(msgpack.unpackb(answer)) for answer in self.agree(msgpack.packb([str(call), call.flaw]))])
        board = self.board.sub(list(ranks))
        return None if board is None else SharedGroup(board, view=self.view, ranks=[self._ranks[r] for r in ranks])

    def global_rank(self, rank: int) -> int:
        """See `Group.global_rank`."""
        return self._ranks[rank]

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Registered memory: all-reduced in place without a copy. `ResourceError` on all ranks when this host has no room."""
        count = 1
        for length in shape:
            count *= length
        region = max(-(-count * dtype.itemsize // 4096) * 4096, 4096)
        segment = self.board.allocate(region * self.size)
        regions = [segment.tensor(r * region, (region,), torch.uint8) for r in range(self.size)]
        mine = regions[self.rank]
        self._registered[mine.data_ptr()] = _Registered(segment, mine.data_ptr(), region, regions)
        return mine[: count * dtype.itemsize].view(dtype).view(tuple(shape))

    def release(self, x: Tensor) -> None:
        """Forget the registered memory that `x` (from `empty`) lies in; it goes when its last tensor does."""
        place = self._place(x)
        if place is not None:
            del self._registered[place.start]
            self._plans.clear()

    def _place(self, x: Tensor) -> _Registered | None:
        if not self._registered or x.numel() == 0:
            return None
        address = x.data_ptr()
        found = self._registered.get(x.untyped_storage().data_ptr())
        if found is None or not found.start <= address < found.start + found.region:
            found = next((r for r in self._registered.values() if r.start <= address < r.start + r.region), None)
        return found

    def close(self) -> None:
        """See `Group.close`."""
        self._end(ViewChanged("this group has been closed"), "closed")

    def abort(self) -> None:
        """See `Group.abort`."""
        self._end(ViewChanged("this group has been aborted"), "aborted")

    def _end(self, error: ViewChanged, word: str) -> None:
        if isinstance(self._broken, ViewChanged):
            return
        self._broken = error
        self.board.leave(word)
        self._void(error)
        self._registered.clear()
        self._plans.clear()


def _bytes(x: Tensor) -> Tensor:
    flat = x.detach().contiguous().view(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def _on_cpu(x: Tensor) -> None:
    if x.device.type != "cpu":
        raise UsageError(f"shared memory moves CPU tensors, got one on {x.device}; use a group with backend 'nccl', or x.cpu()")


def _admit(x: Tensor, op: Op) -> None:
    _on_cpu(x)
    admit(op, x.dtype)


def fold(parts: Sequence[Tensor], out: Tensor, op: Op) -> None:
    """out = the reduction of `parts` in their order, rounded once; `out` may be one of them only if it is the first."""
    first, *rest = parts
    held = wide(first.dtype, op)
    if held != first.dtype:
        total = first.to(held)
        for part in rest:
            combine(op, total, part if op != "product" else part.to(held))
        out.copy_(finish(op, total, len(parts)))
        return
    if rest and op in ("sum", "mean"):
        torch.add(first, rest[0], out=out)
        del rest[0]
    elif out.data_ptr() != first.data_ptr():
        out.copy_(first)
    for part in rest:
        combine(op, out, part)
    finish(op, out, len(parts))
