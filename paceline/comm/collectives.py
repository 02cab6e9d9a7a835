"""Runs a schedule on any group, and builds other collectives from `exchange` alone.

A group with connections of its own runs schedules in C (`RunsSchedules`). What follows is for the
others: groups inside a host, and tensors on GPUs.

All ranks know from the schedule what is sent in a round, so only tensors travel. Halves (float16,
bfloat16) are added in float32: a partial sum travels in float32, a rank's own part and a finished
sum in the dtype of the tensor.

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
from paceline.comm import fingerprint, reduction_rules
from paceline.comm.fingerprint import CallFingerprint
from paceline.comm.group_protocol import (
    Group,
    Op,
    Work,
    needs_inference_mode,
    piece_bounds,
    resume_mode,
)
from paceline.comm.schedule import Schedule, carried_contributions
from paceline.comm.shm.window_messages import is_plain
from paceline.errors import PacelineError

TAG = 1 << 16  # first tag of the rounds of schedules; smaller tags belong to other exchanges
Steps = Generator[Work[None], None, Any]


@runtime_checkable
class UncheckedExchange(Protocol):
    """A group that can exchange messages without comparing them first."""

    def exchange_agreed(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        *,
        tag: int = 0,
    ) -> Work[None]:
        """Exchange as `Group.exchange` does, but without a check that ranks agree."""
        ...


@runtime_checkable
class RunsSchedules(Protocol):
    """A group whose connections run schedules by themselves."""

    def reduce_by_schedule(self, x: Tensor, plan: Schedule, op: Op, out: Tensor) -> Work[Tensor]:
        """Begin to reduce `x`, which is in the CPU's memory, into `out`; nothing is compared.

        Several may be under way. All ranks begin them in the same order.
        """
        ...


class ChunkMessage(NamedTuple):
    """Chunks `start` to `stop` (exclusive), sent from `src` to `dst` as one message."""

    src: int
    dst: int
    start: int
    stop: int
    add: bool
    wide: bool  # a partial sum, which travels in the dtype that sums are held in


class GeneratorWork:
    """The Work of a generator that yields a Work whenever it has to wait.

    `wait` and `done` advance the generator. `written`: tensors that the operation writes to.
    """

    def __init__(self, steps: Steps, written: Sequence[Tensor] = ()) -> None:
        self._steps, self._inference = steps, needs_inference_mode(*written)
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
                    raise  # only this wait has ended, not the operation
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
        """Run the generator to its next wait. An error of the last wait is raised inside it."""
        try:
            error = self._pending.exception() if self._pending is not None else None
            with resume_mode(self._inference):
                self._pending = next(self._steps) if error is None else self._steps.throw(error)
        except StopIteration as stop:
            self._result, self._ended = stop.value, True
        except (PacelineError, RuntimeError) as error:
            self._error, self._ended = error, True


def compare_on_group(group: Group, call: CallFingerprint) -> None:
    """Compare the call that every rank is about to make, over the control channel.

    Raises the same `Mismatch` or `UsageError` on all ranks if the calls differ.
    """
    answers = group.gather_bytes(msgpack.packb((str(call), call.flaw)))
    texts = [tuple(msgpack.unpackb(answer)) for answer in answers]
    # All ranks see the same texts, so either all or none of them make the second call, which
    # gathers the lines of the script for the error.
    differ = any(text != texts[0] for text in texts)
    lines = (
        [line.decode() for line in group.gather_bytes(callsite.find_user_line().encode())]
        if differ
        else ()
    )
    fingerprint.check_calls_agree(texts, lines=lines)


def all_reduce_by_schedule(
    group: Group,
    x: Tensor,
    schedule: Schedule,
    op: Op = "sum",
    *,
    name: str | None = None,
    out: Tensor | None = None,
) -> Work[Tensor]:
    """Reduce every rank's `x` by the moves of `schedule`, after comparing the call on all ranks.

    One operation at a time on a group; a `ScheduleQueue` holds several.

    Args:
        group: All ranks of the schedule.
        x: A tensor of the same shape and dtype on all ranks.
        schedule: A schedule of `group.size` ranks, the same on all ranks.
        op: "sum" (default), "mean", "min", "max" or "product".
        name: The caller's word for this call. Default: none.
        out: Where the result goes; may be `x`. Default: a new tensor.

    Returns:
        A Work that gives `out`, or the new tensor, with the same bits on all ranks.
    """
    call = fingerprint.reduction_call("all_reduce", x, op, name, out)
    if schedule.size != group.size:
        call = call._replace(
            flaw=(
                f"{schedule.name} is a schedule of {schedule.size} ranks, the group has "
                f"{group.size}"
            )
        )
    compare_on_group(group, call._replace(detail=f"{call.detail}, by {schedule.name}"))
    return all_reduce_by_schedule_agreed(group, x, schedule, op, out=out)


def all_reduce_by_schedule_agreed(
    group: Group,
    x: Tensor,
    schedule: Schedule,
    op: Op = "sum",
    *,
    out: Tensor | None = None,
    tag: int = TAG,
) -> Work[Tensor]:
    """Reduce as `all_reduce_by_schedule` does, without comparing first.

    `tag`: tag of the first round; each later round has the next one.
    """
    reduction_rules.check_operation(op, x.dtype)
    if isinstance(group, RunsSchedules) and x.device.type == "cpu":
        return group.reduce_by_schedule(x, schedule, op, _make_output(x) if out is None else out)
    return GeneratorWork(
        _run_schedule(group, x.detach(), (schedule, op, tag), out), [] if out is None else [out]
    )


def _make_output(x: Tensor) -> Tensor:
    return torch.empty_like(x.detach(), memory_format=torch.contiguous_format)


class ScheduleQueue:
    """Runs schedules on one group, one after another; several may be pending.

    Any waiter advances rounds. Without a queue, the rounds of two operations could therefore go
    out in different orders on different ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._last: Work[Any] | None = None

    def all_reduce(
        self, x: Tensor, schedule: Schedule, op: Op = "sum", *, out: Tensor | None = None
    ) -> Work[Tensor]:
        """Reduce as `all_reduce_by_schedule_agreed` does, after all operations in the queue.

        If one of those fails, this one fails with the same error.
        """
        reduction_rules.check_operation(op, x.dtype)
        if isinstance(self._group, RunsSchedules) and x.device.type == "cpu":
            return all_reduce_by_schedule_agreed(self._group, x, schedule, op, out=out)
        steps = _run_schedule(self._group, x.detach(), (schedule, op, TAG), out)
        self._last = GeneratorWork(
            steps if self._last is None else _run_after(self._last, steps),
            [] if out is None else [out],
        )
        return self._last


def _run_after(before: Work[Any], steps: Steps) -> Steps:
    if not before.done():
        yield before
    error = before.exception()
    if error is not None:
        raise error
    return (yield from steps)


def _run_schedule(
    group: Group, x: Tensor, what: tuple[Schedule, Op, int], out: Tensor | None
) -> Steps:
    """Run a schedule round by round. `what`: the schedule, the operation and the first tag."""
    schedule, op, tag = what
    out = _make_output(x) if out is None else out
    x = x.resolve_conj().resolve_neg()
    # Work in the memory of `out` if its elements lie in order and overlap no unread part of `x`.
    direct = is_plain(out) and not reduction_rules.overlaps_partly(x, out)
    flat = (
        out.detach().view(-1) if direct else torch.empty(x.numel(), dtype=x.dtype, device=x.device)
    )
    if flat.data_ptr() != x.data_ptr() or not x.is_contiguous():
        flat.view(x.shape).copy_(x)
    # Partial sums. `to` copies only if the dtype differs, so for all but halves it is `flat`.
    held = flat.to(reduction_rules.accumulation_dtype(x.dtype, op))
    buffers = _ScheduleBuffers(flat, held, chunk_edges(schedule.chunks, x.numel()), op, group.size)
    if group.size == 1:
        buffers.complete_chunks(0, len(schedule.chunks))
    for step, (messages, completed) in enumerate(plan_rounds(schedule)):
        yield from _exchange_round(group, buffers, messages, tag + step)
        for chunk in completed.get(group.rank, ()):
            buffers.complete_chunks(chunk, chunk + 1)
    if not direct:
        out.detach().copy_(flat.view(out.shape))
    return out


class _ScheduleBuffers(NamedTuple):
    """Memory of one run of a schedule.

    flat: Own parts and finished chunks, in the dtype of the tensor.
    held: Partial sums: float32 for the halves, else the same tensor as `flat`.
    edges: Element at which each chunk begins, and the end of the last.
    """

    flat: Tensor
    held: Tensor
    edges: list[int]
    op: Op
    size: int

    def select_elements(self, message: ChunkMessage) -> Tensor:
        """Select the elements that `message` takes away, or the place where they belong."""
        return (self.held if message.wide else self.flat)[
            self.edges[message.start] : self.edges[message.stop]
        ]

    def complete_chunks(self, start: int, stop: int) -> None:
        """Finish chunks that have every contribution: divide a mean, round once to the dtype."""
        span = slice(self.edges[start], self.edges[stop])
        total = reduction_rules.finish_reduction(self.op, self.held[span], self.size)
        if self.held is not self.flat:
            self.flat[span] = total

    def add_received(self, chunk: int, received: list[tuple[int, Tensor]], rank: int) -> None:
        """Add the parts that came from other ranks to this rank's part, in the order of ranks."""
        own = self.held[self.edges[chunk] : self.edges[chunk + 1]]
        # One other part: a + b and b + a have the same bits, so the order does not matter.
        if len(received) == 1 and (rank < received[0][0] or self.op in ("sum", "mean")):
            reduction_rules.fold_into(self.op, own, received[0][1].to(own))
            return
        terms = [term for _, term in sorted([*received, (rank, own)], key=lambda pair: pair[0])]
        total = terms[0] if terms[0] is own else terms[0].to(own)
        for term in terms[1:]:
            reduction_rules.fold_into(self.op, total, term.to(own))
        if total is not own:
            own.copy_(total)


def _exchange_round(
    group: Group, buffers: _ScheduleBuffers, messages: Sequence[ChunkMessage], tag: int
) -> Steps:
    """Exchange the messages of one round, and add or store the parts that came."""
    nonempty = [m for m in messages if buffers.edges[m.stop] > buffers.edges[m.start]]
    outgoing = [m for m in nonempty if m.src == group.rank]
    incoming = [m for m in nonempty if m.dst == group.rank]
    # Receive in place, unless the part is added to ours, or leaves in the same round.
    landings = []
    for message in incoming:
        part = buffers.select_elements(message)
        leaves = any(m.start < message.stop and message.start < m.stop for m in outgoing)
        landings.append(torch.empty_like(part) if message.add or leaves else part)
    exchange = group.exchange_agreed if isinstance(group, UncheckedExchange) else group.exchange
    recvs = [(m.src, landing) for m, landing in zip(incoming, landings, strict=True)]
    yield exchange([(m.dst, buffers.select_elements(m)) for m in outgoing], recvs, tag=tag)
    added: dict[int, list[tuple[int, Tensor]]] = {}
    for message, landing in zip(incoming, landings, strict=True):
        if not message.add:
            if landing.data_ptr() != buffers.select_elements(message).data_ptr():
                buffers.select_elements(message).copy_(landing)
            continue
        # A message may span chunks, and chunks of several messages may overlap: sort by chunk.
        base = buffers.edges[message.start]
        for chunk in range(message.start, message.stop):
            span = slice(buffers.edges[chunk] - base, buffers.edges[chunk + 1] - base)
            added.setdefault(chunk, []).append((message.src, landing[span]))
    for chunk, received in added.items():
        buffers.add_received(chunk, received, group.rank)
    return None


# Messages of a round, and the chunks whose sums are complete on each rank after it.
Round: TypeAlias = tuple[list[ChunkMessage], dict[int, list[int]]]


def chunk_edges(chunks: Sequence[float], numel: int) -> list[int]:
    """List the element at which each chunk of `numel` elements begins, and the end of the last."""
    return [
        0,
        *(min(numel, round(total * numel)) for total in list(accumulate(chunks))[:-1]),
        numel,
    ]


@lru_cache(maxsize=256)
def plan_rounds(schedule: Schedule) -> list[Round]:
    """Plan the messages of each round, and the chunks that each rank completes in it. Cached.

    Moves of neighbouring chunks between the same ranks become one message.
    """
    contributions = [[1] * len(schedule.chunks) for _ in range(schedule.size)]
    rounds: list[Round] = []
    for moves, loads in zip(schedule.rounds, carried_contributions(schedule), strict=True):
        parts = [
            (m.src, m.dst, m.add, 1 < len(load) < schedule.size, m.chunk)
            for m, load in zip(moves, loads, strict=True)
        ]
        # Sorted by rank and chunk, so that chunks side by side can be joined.
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
        # A chunk is complete once it has the contributions of all ranks. It is then rounded once.
        completed: dict[int, list[int]] = {}
        for move, load in zip(moves, loads, strict=True):
            if move.add:
                contributions[move.dst][move.chunk] += len(load)
                if contributions[move.dst][move.chunk] == schedule.size:
                    completed.setdefault(move.dst, []).append(move.chunk)
        rounds.append((messages, completed))
    return rounds


def reduce_scatter_by_exchange(
    group: Group, x: Tensor, op: Op = "sum", *, tag: int = 0
) -> Work[Tensor]:
    """Send each piece to its owner, which adds all ranks' parts in rank order. Not compared.

    (n-1)/n of the tensor leaves each rank.
    """
    reduction_rules.check_operation(op, x.dtype)

    def steps() -> Steps:
        flat = x.detach().reshape(-1)
        all_pieces = piece_bounds(flat.numel(), group.size)
        start, stop = all_pieces[group.rank]
        parts = [flat[begin:end] for begin, end in all_pieces]
        received: list[Tensor] = yield from _send_to_each(
            group, parts, [(stop - start,)] * group.size, tag
        )
        return reduction_rules.reduce_parts(op, received)

    return GeneratorWork(steps())


def all_gather_by_exchange(
    group: Group, x: Tensor, shapes: Sequence[Sequence[int]], *, tag: int = 0
) -> Work[list[Tensor]]:
    """Send `x` from every rank to all others. Not compared.

    `shapes`: the shape of every rank's tensor, which all ranks have agreed on before.
    """
    return GeneratorWork(_send_to_each(group, [x.detach()] * group.size, shapes, tag))


def all_to_all_by_exchange(
    group: Group, xs: Sequence[Tensor], shapes: Sequence[Sequence[int]], *, tag: int = 0
) -> Work[list[Tensor]]:
    """Send `xs[r]` to rank r. Not compared.

    `shapes`: the shape of the tensor that comes from each rank, agreed on before.
    """
    return GeneratorWork(_send_to_each(group, xs, shapes, tag))


def _send_to_each(
    group: Group, xs: Sequence[Tensor], shapes: Sequence[Sequence[int]], tag: int
) -> Steps:
    """Send one message from every rank to every rank; empty tensors are not sent."""
    me = group.rank
    outs = [torch.empty(tuple(shape), dtype=xs[0].dtype, device=xs[0].device) for shape in shapes]
    outs[me].copy_(xs[me])
    # Each rank begins with its right neighbour, so that not all send to rank 0 first.
    turns = [(me + step) % group.size for step in range(1, group.size)]
    sends = [(to, xs[to].detach().contiguous()) for to in turns if xs[to].numel()]
    exchange = group.exchange_agreed if isinstance(group, UncheckedExchange) else group.exchange
    yield exchange(
        sends, [(source, outs[source]) for source in turns if outs[source].numel()], tag=tag
    )
    return outs
