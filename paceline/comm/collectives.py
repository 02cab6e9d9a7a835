"""Runs a schedule on any group, and builds the other collectives from `exchange` alone.

What is sent in a round is known to all from the schedule, so nothing but tensors travels. A sum
that is still partial travels in the dtype it is added in (float32 for the halves); a rank's own
part, and a finished sum, in the dtype of the tensor.

    x, out (float16)       rank 0: own part  . . . . . . . . finished -> sent, copied to
    held   (float32)       rank 0: own part + received, in rank order, partial -> sent
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import msgpack
import torch
from torch import Tensor

from paceline import callsite
from paceline.comm import fingerprint, reduction
from paceline.comm.fingerprint import CallFingerprint
from paceline.comm.group import Group, Op, Work, as_begun, begun, pieces
from paceline.comm.schedule import Schedule, carried
from paceline.comm.shm.messages import plain
from paceline.errors import PacelineError

TAG = 1 << 16  # tags of the rounds of schedules begin here: below are those of other exchanges
Steps = Generator[Work[None], None, Any]


@runtime_checkable
class UncheckedExchange(Protocol):
    """A group that can exchange messages that all ranks are known to agree on, without comparing
    them first.
    """

    def exchange_agreed(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        *,
        tag: int = 0,
    ) -> Work[None]:
        """Exchange as `Group.exchange` does, without finding differences between ranks."""
        ...


class ChunkMessage(NamedTuple):
    """Chunks `start` to `stop` from `src` to `dst`; partial sums are `wide`."""

    src: int
    dst: int
    start: int
    stop: int
    add: bool
    wide: bool


class GeneratorWork:
    """The Work of a generator that yields a Work whenever it has to wait; `wait` and `done` push
    it forward. It writes to `written`.
    """

    def __init__(self, steps: Steps, written: Sequence[Tensor] = ()) -> None:
        self._steps, self._inference = steps, begun(*written)
        self._pending: Work[None] | None = None
        self._result: Any = None
        self._error: BaseException | None = None
        self._ended = False
        self._advance()

    def wait(self, timeout: float | None = None) -> Any:
        limit = None if timeout is None else time.monotonic() + timeout
        while not self._ended:
            assert self._pending is not None
            try:
                self._pending.wait(None if limit is None else max(0.0, limit - time.monotonic()))
            except PacelineError:
                if self._pending.exception() is None:
                    raise  # only this wait is over
            self._advance()
        if self._error is not None:
            raise self._error
        return self._result

    def done(self) -> bool:
        while not self._ended and self._pending is not None and self._pending.done():
            self._advance()
        return self._ended

    def exception(self) -> BaseException | None:
        return self._error if self.done() else None

    def _advance(self) -> None:
        """Run the generator to its next wait; the error of the last wait is raised inside it."""
        try:
            error = self._pending.exception() if self._pending is not None else None
            with as_begun(self._inference):
                self._pending = next(self._steps) if error is None else self._steps.throw(error)
        except StopIteration as stop:
            self._result, self._ended = stop.value, True
        except (PacelineError, RuntimeError) as error:
            self._error, self._ended = error, True


def meet(group: Group, call: CallFingerprint) -> None:
    """Compare what every rank is about to do, over the control channel; raises on all ranks if
    the calls differ.
    """
    texts = [
        tuple(msgpack.unpackb(answer))
        for answer in group.agree(msgpack.packb((str(call), call.flaw)))
    ]
    apart = any(text != texts[0] for text in texts)  # all ranks see the same texts
    fingerprint.compare(
        texts,
        lines=[line.decode() for line in group.agree(callsite.place().encode())] if apart else (),
    )


def all_reduce(
    group: Group,
    x: Tensor,
    schedule: Schedule,
    op: Op = "sum",
    *,
    name: str | None = None,
    out: Tensor | None = None,
) -> Work[Tensor]:
    """Reduce every rank's `x` by the moves of `schedule`; bit-equal on all ranks.

    Compared with the others before it starts.

    One at a time on a group; a `ScheduleQueue` holds several.
    """
    call = fingerprint.reducing("all_reduce", x, op, name, out)
    if schedule.size != group.size:
        call = call._replace(
            flaw=(
                f"{schedule.name} is a schedule of {schedule.size} ranks, the group has "
                f"{group.size}"
            )
        )
    meet(group, call._replace(detail=f"{call.detail}, by {schedule.name}"))
    return all_reduce_agreed(group, x, schedule, op, out=out)


def all_reduce_agreed(
    group: Group,
    x: Tensor,
    schedule: Schedule,
    op: Op = "sum",
    *,
    out: Tensor | None = None,
    tag: int = TAG,
) -> Work[Tensor]:
    """Reduce as `all_reduce` does what all ranks are known to agree on.

    Its rounds have the tags from `tag` on.
    """
    reduction.admit(op, x.dtype)
    return GeneratorWork(
        _run(group, x.detach(), (schedule, op, tag), out), [] if out is None else [out]
    )


class ScheduleQueue:
    """Runs schedules on one group, several under way at a time: each begins when the one before it
    has ended.

    Any waiter pushes rounds forward, so without a queue those of two operations could go out in
    another order on another rank.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._last: Work[Any] | None = None

    def all_reduce(
        self, x: Tensor, schedule: Schedule, op: Op = "sum", *, out: Tensor | None = None
    ) -> Work[Tensor]:
        """Reduce as `all_reduce_agreed` does, after all that the queue holds; when one of those
        fails, so does this.
        """
        reduction.admit(op, x.dtype)
        steps = _run(self._group, x.detach(), (schedule, op, TAG), out)
        self._last = GeneratorWork(
            steps if self._last is None else _after(self._last, steps), [] if out is None else [out]
        )
        return self._last


def _after(before: Work[Any], steps: Steps) -> Steps:
    if not before.done():
        yield before
    error = before.exception()
    if error is not None:
        raise error
    return (yield from steps)


def _run(group: Group, x: Tensor, what: tuple[Schedule, Op, int], out: Tensor | None) -> Steps:
    schedule, op, tag = what
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    x = x.resolve_conj().resolve_neg()
    direct = plain(out) and not reduction.crossing(x, out)
    flat = (
        out.detach().view(-1) if direct else torch.empty(x.numel(), dtype=x.dtype, device=x.device)
    )
    if flat.data_ptr() != x.data_ptr() or not x.is_contiguous():
        flat.view(x.shape).copy_(x)
    held = flat.to(reduction.wide(x.dtype, op))
    buffers = _ScheduleBuffers(flat, held, edges(schedule.chunks, x.numel()), op, group.size)
    if group.size == 1:
        buffers.complete(0, len(schedule.chunks))
    for step, (messages, completed) in enumerate(plan(schedule)):
        yield from _round(group, buffers, messages, tag + step)
        for chunk in completed.get(group.rank, ()):
            buffers.complete(chunk, chunk + 1)
    if not direct:
        out.detach().copy_(flat.view(out.shape))
    return out


class _ScheduleBuffers(NamedTuple):
    """The memory of a schedule: `flat` holds own parts and finished chunks, `held` partial sums;
    one tensor but for the halves.
    """

    flat: Tensor
    held: Tensor
    edges: list[int]
    op: Op
    size: int

    def part(self, message: ChunkMessage) -> Tensor:
        """Return the elements that `message` carries away, or where they are kept."""
        return (self.held if message.wide else self.flat)[
            self.edges[message.start] : self.edges[message.stop]
        ]

    def complete(self, start: int, stop: int) -> None:
        """Round these chunks once: they have every contribution."""
        span = slice(self.edges[start], self.edges[stop])
        total = reduction.finish(self.op, self.held[span], self.size)
        if self.held is not self.flat:
            self.flat[span] = total

    def add(self, chunk: int, received: list[tuple[int, Tensor]], rank: int) -> None:
        """Add what came from other ranks to this rank's part of `chunk`, in the order of ranks."""
        mine = self.held[self.edges[chunk] : self.edges[chunk + 1]]
        # sums have the same bits in either order
        if len(received) == 1 and (rank < received[0][0] or self.op in ("sum", "mean")):
            reduction.combine(self.op, mine, received[0][1].to(mine))
            return
        terms = [term for _, term in sorted([*received, (rank, mine)], key=lambda pair: pair[0])]
        total = terms[0] if terms[0] is mine else terms[0].to(mine)
        for term in terms[1:]:
            reduction.combine(self.op, total, term.to(mine))
        if total is not mine:
            mine.copy_(total)


def _round(
    group: Group, buffers: _ScheduleBuffers, messages: Sequence[ChunkMessage], tag: int
) -> Steps:
    """Exchange the messages of one round, and add or keep what came."""
    nonempty = [m for m in messages if buffers.edges[m.stop] > buffers.edges[m.start]]
    mine = [m for m in nonempty if m.src == group.rank]
    coming = [m for m in nonempty if m.dst == group.rank]
    landings = []
    for message in coming:
        part = buffers.part(message)
        busy = any(m.start < message.stop and message.start < m.stop for m in mine)
        landings.append(torch.empty_like(part) if message.add or busy else part)
    exchange = group.exchange_agreed if isinstance(group, UncheckedExchange) else group.exchange
    recvs = [(m.src, landing) for m, landing in zip(coming, landings, strict=True)]
    yield exchange([(m.dst, buffers.part(m)) for m in mine], recvs, tag=tag)
    added: dict[int, list[tuple[int, Tensor]]] = {}
    for message, landing in zip(coming, landings, strict=True):
        if not message.add:
            if landing.data_ptr() != buffers.part(message).data_ptr():
                buffers.part(message).copy_(landing)
            continue
        base = buffers.edges[message.start]
        for chunk in range(message.start, message.stop):
            span = slice(buffers.edges[chunk] - base, buffers.edges[chunk + 1] - base)
            added.setdefault(chunk, []).append((message.src, landing[span]))
    for chunk, received in added.items():
        buffers.add(chunk, received, group.rank)
    return None


# the messages, and the chunks that each rank has summed up after them
Round: TypeAlias = tuple[list[ChunkMessage], dict[int, list[int]]]


def edges(chunks: Sequence[float], numel: int) -> list[int]:
    """Return where each chunk of `numel` elements begins and ends."""
    return [
        0,
        *(min(numel, round(total * numel)) for total in list(accumulate(chunks))[:-1]),
        numel,
    ]


@lru_cache(maxsize=256)
def plan(schedule: Schedule) -> list[Round]:
    """Plan the messages of each round, neighbouring chunks joined, and which rank completes
    which chunks in it; cached.
    """
    # how many contributions there are
    state = [[1] * len(schedule.chunks) for _ in range(schedule.size)]
    rounds: list[Round] = []
    for moves, loads in zip(schedule.rounds, carried(schedule), strict=True):
        parts = [
            (m.src, m.dst, m.add, 1 < len(load) < schedule.size, m.chunk)
            for m, load in zip(moves, loads, strict=True)
        ]
        messages: list[ChunkMessage] = []
        for src, dst, add, wide, chunk in sorted(parts):
            last = messages[-1] if messages else None
            if last is not None and (last.src, last.dst, last.add, last.wide, last.stop) == (
                src,
                dst,
                add,
                wide,
                chunk,
            ):
                messages[-1] = last._replace(stop=chunk + 1)
            else:
                messages.append(ChunkMessage(src, dst, chunk, chunk + 1, add, wide))
        completed: dict[int, list[int]] = {}
        for move, load in zip(moves, loads, strict=True):
            if move.add:
                state[move.dst][move.chunk] += len(load)
                if state[move.dst][move.chunk] == schedule.size:
                    completed.setdefault(move.dst, []).append(move.chunk)
        rounds.append((messages, completed))
    return rounds


def reduce_scatter(group: Group, x: Tensor, op: Op = "sum", *, tag: int = 0) -> Work[Tensor]:
    """Reduce pieces: every rank sends each piece to its owner, which adds in rank order; (n-1)/n
    of the tensor from each. Not compared.
    """
    reduction.admit(op, x.dtype)

    def steps() -> Steps:
        flat = x.detach().reshape(-1)
        mine = pieces(flat.numel(), group.size)[group.rank]
        parts = [flat[start:stop] for start, stop in pieces(flat.numel(), group.size)]
        received: list[Tensor] = yield from _deal(
            group, parts, [(mine[1] - mine[0],)] * group.size, tag
        )
        return reduction.reduce(op, received)

    return GeneratorWork(steps())


def all_gather(
    group: Group, x: Tensor, shapes: Sequence[Sequence[int]], *, tag: int = 0
) -> Work[list[Tensor]]:
    """Send `x` from every rank to all others; `shapes` are those of all ranks.

    Not compared: all have agreed before.
    """
    return GeneratorWork(_deal(group, [x.detach()] * group.size, shapes, tag))


def all_to_all(
    group: Group, xs: Sequence[Tensor], shapes: Sequence[Sequence[int]], *, tag: int = 0
) -> Work[list[Tensor]]:
    """Send xs[r] to rank r; `shapes` are those of what comes from each rank.

    Not compared: all have agreed before.
    """
    return GeneratorWork(_deal(group, xs, shapes, tag))


def _deal(group: Group, xs: Sequence[Tensor], shapes: Sequence[Sequence[int]], tag: int) -> Steps:
    """Send one message from every rank to every rank; empty tensors aren't sent."""
    me = group.rank
    outs = [torch.empty(tuple(shape), dtype=xs[0].dtype, device=xs[0].device) for shape in shapes]
    outs[me].copy_(xs[me])
    turns = [(me + step) % group.size for step in range(1, group.size)]  # not all at rank 0 first
    sends = [(to, xs[to].detach().contiguous()) for to in turns if xs[to].numel()]
    exchange = group.exchange_agreed if isinstance(group, UncheckedExchange) else group.exchange
    yield exchange(
        sends, [(source, outs[source]) for source in turns if outs[source].numel()], tag=tag
    )
    return outs
