"""A Group whose ranks are threads of one process, for tests of strategies in milliseconds.

It raises the errors of real processes.

channel "calls"    0: all_reduce   1: barrier   2: ...
channel "agree"    0: ...
channel "agreed"   0: ...

Every rank posts its part of call k. The last one to post does the work for all of them, and the
waiters wake up.
"""

from __future__ import annotations

import copy
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from paceline.comm import fingerprint, reduction_rules
from paceline.comm.fingerprint import CallFingerprint
from paceline.comm.group_protocol import (
    Op,
    Traffic,
    Work,
    needs_inference_mode,
    piece_bounds,
    resume_mode,
)
from paceline.comm.traffic_meter import TrafficMeter
from paceline.comm.waitgraph import GRACE, RankWait, describe_late, find_stuck, make_stuck_error
from paceline.errors import (
    DeadlineExceeded,
    Mismatch,
    PacelineError,
    UsageError,
    ViewChanged,
    WorkerLost,
)

T = TypeVar("T")
TICK = 0.1  # seconds between two looks at what went wrong while waiting


class _ThreadCall:
    """One call: the parts of the ranks that have come, and its outcome."""

    def __init__(self, number: int, names: Sequence[int]) -> None:
        self.number = number
        self.parts: dict[int, tuple[CallFingerprint, Any]] = {}
        self.inference = False  # on any rank
        self.names = names
        self.ended = False
        self.results: list[Any] = []
        self.error: BaseException | None = None

    def end(self, finish: Callable[[list[Any]], list[Any]]) -> None:
        """Do the work of the call, once all parts are there."""
        parts = [self.parts[rank] for rank in range(len(self.names))]
        try:
            fingerprint.check_calls_agree([(str(call), call.flaw) for call, _ in parts], self.names)
            with resume_mode(self.inference):
                self.results = finish([data for _, data in parts])
        except (PacelineError, RuntimeError) as error:
            self.error = error


class _ThreadBoard:
    """The state that the threads of one group share."""

    def __init__(self, names: Sequence[int], deadline: float) -> None:
        self.names = tuple(names)  # what the ranks are called: their numbers among all workers
        self.size = size = len(self.names)
        self.deadline = deadline
        self.changed = threading.Condition()
        self.slots: dict[tuple[str, int], _ThreadCall] = {}
        self.made: list[dict[str, int]] = [{} for _ in range(size)]
        self.waits: dict[int, RankWait] = {}
        self.left: dict[int, str] = {}
        self.broken: BaseException | None = None

    def post(
        self,
        rank: int,
        channel: str,
        call: CallFingerprint,
        data: Any,
        finish: Callable[[list[Any]], list[Any]],
        *,
        inference: bool,
    ) -> _ThreadCall:
        """Make the next call of rank `rank` on `channel`."""
        with self.changed:
            number = self.made[rank].get(channel, 0)
            self.made[rank][channel] = number + 1
            slot = self.slots.setdefault((channel, number), _ThreadCall(number, self.names))
            slot.parts[rank] = (call, data)
            slot.inference = slot.inference or inference
            last = len(slot.parts) == self.size
            if last:
                del self.slots[channel, number]
        if last:
            slot.end(finish)
            with self.changed:
                slot.ended = True
                self.changed.notify_all()
        return slot

    def fail(self, error: BaseException) -> None:
        """End every pending call, and all later ones, with `error`."""
        with self.changed:
            if self.broken is None:
                self.broken = error
            self.changed.notify_all()

    def leave(self, rank: int, why: str) -> None:
        """Note that rank `rank` makes no more calls."""
        with self.changed:
            self.left.setdefault(rank, why)
            self.changed.notify_all()


class _ThreadWork:
    """The Work of one rank in one call."""

    def __init__(
        self, group: ThreadGroup, channel: str, call: CallFingerprint, slot: _ThreadCall
    ) -> None:
        self._group, self._channel, self._call, self._slot = group, channel, call, slot

    def done(self) -> bool:
        return self._error() is not None or self._slot.ended

    def exception(self) -> BaseException | None:
        return self._error()

    def wait(self, timeout: float | None = None) -> Any:
        segment, slot = self._group.segment, self._slot
        start = time.monotonic()
        limit = start + (segment.deadline if timeout is None else timeout)
        with segment.changed:
            while not self.done():
                now = time.monotonic()
                if now >= limit:
                    raise self._late(now - start)
                self._look(now - start)
                segment.changed.wait(min(TICK, limit - now))
            segment.waits.pop(self._group.rank, None)
        self._group.waited += time.monotonic() - start
        error = self._error()
        if error is not None:
            raise copy.copy(error)
        self._group.pause()
        return slot.results[self._group.rank]

    def _error(self) -> BaseException | None:
        segment, slot = self._group.segment, self._slot
        if slot.ended:
            return slot.error
        if segment.broken is not None:
            return segment.broken
        gone = tuple(rank for rank in tuple(segment.left) if rank not in slot.parts)
        if gone:
            who = ", ".join(f"rank {segment.names[rank]} ({segment.left[rank]})" for rank in gone)
            return WorkerLost(
                f"{self._call} waits for {who}, which has left the group",
                tuple(segment.names[rank] for rank in gone),
            )
        return None

    def _look(self, waited: float) -> None:
        """Find ranks that wait for each other; called with the board's lock held."""
        segment = self._group.segment
        rank = self._group.rank
        segment.waits[rank] = RankWait(
            self._channel, self._slot.number, str(self._call), dict(segment.made[rank])
        )
        stuck = find_stuck(segment.waits) if waited > GRACE else {}
        if stuck:
            segment.fail(make_stuck_error(stuck, self._group.names))

    def _late(self, seconds: float) -> DeadlineExceeded:
        segment = self._group.segment
        segment.waits.pop(self._group.rank, None)
        absent = {
            segment.names[rank]: segment.waits.get(rank)
            for rank in range(segment.size)
            if rank not in self._slot.parts
        }
        return DeadlineExceeded(describe_late(str(self._call), seconds, absent), tuple(absent))


class ThreadGroup:
    """A `Group` of threads; made by `spawn`, or by `sub` of another.

    `hosts` is the host that each rank is taken to be on (for the traffic counted). `delay(rank)` is
    called before every call and after every wait: tests inject sleeps with it.
    """

    view = 0

    def __init__(
        self,
        segment: _ThreadBoard,
        rank: int,
        *,
        hosts: Sequence[int] | None = None,
        delay: Callable[[int], None] | None = None,
    ) -> None:
        self.segment = segment
        self.rank = rank
        self.size = segment.size
        self.waited = 0.0
        self._meter = TrafficMeter(rank, segment.size, hosts)
        self.traffic: Traffic = self._meter.traffic
        self._delay = delay
        self.names = segment.names
        self._children: list[ThreadGroup] = []

    def pause(self) -> None:
        """Sleep as the test wants this rank to."""
        if self._delay is not None:
            self._delay(self.names[self.rank])

    def _post(
        self,
        call: CallFingerprint,
        data: Any,
        finish: Callable[[list[Any]], list[Any]],
        channel: str = "calls",
    ) -> Work[Any]:
        self.pause()
        inference = needs_inference_mode(*(x for x in tree_leaves(data) if isinstance(x, Tensor)))
        return _ThreadWork(
            self,
            channel,
            call,
            self.segment.post(self.rank, channel, call, data, finish, inference=inference),
        )

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        *,
        tag: int = 0,
    ) -> Work[None]:
        for to, x in sends:
            self._meter.count_sent(to, x.numel() * x.element_size())
        return self._post(
            fingerprint.exchange_call(sends, recvs, tag, self.size), (sends, recvs), _deliver
        )

    def exchange_agreed(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        *,
        tag: int = 0,
    ) -> Work[None]:
        """Exchange on a channel of its own for each `tag`."""
        for to, x in sends:
            self._meter.count_sent(to, x.numel() * x.element_size())
        return self._post(
            fingerprint.exchange_call(sends, recvs, tag, self.size),
            (sends, recvs),
            _deliver,
            f"exchange {tag}",
        )

    def all_reduce(
        self, x: Tensor, *, op: Op = "sum", name: str | None = None, out: Tensor | None = None
    ) -> Work[Tensor]:
        self._meter.count_ring(x.numel() * x.element_size())
        return self._post(
            fingerprint.reduction_call("all_reduce", x, op, name, out),
            (x, out),
            lambda parts: _reduced(op, parts),
        )

    def all_reduce_agreed(
        self, x: Tensor, *, op: Op = "sum", out: Tensor | None = None
    ) -> Work[Tensor]:
        """Reduce on a channel of its own, for layouts agreed before: safe beside calls made by
        other threads of this rank.
        """
        self._meter.count_ring(x.numel() * x.element_size())
        call = fingerprint.reduction_call("all_reduce_agreed", x, op, None, out)
        return self._post(call, (x, out), lambda parts: _reduced(op, parts), "agreed")

    def reduce_scatter(self, x: Tensor, *, op: Op = "sum", name: str | None = None) -> Work[Tensor]:
        self._meter.count_ring(x.numel() * x.element_size(), laps=1)

        def finish(xs: list[Tensor]) -> list[Tensor]:
            reduction_rules.check_operation(op, xs[0].dtype)
            total = reduction_rules.reduce_parts(op, xs).flatten()
            return [
                total[start:stop].clone() for start, stop in piece_bounds(total.numel(), len(xs))
            ]

        return self._post(fingerprint.reduction_call("reduce_scatter", x, op, name), x, finish)

    def all_gather(self, x: Tensor, *, name: str | None = None) -> Work[list[Tensor]]:
        self._meter.count_to_all(x.numel() * x.element_size())
        finish: Callable[[list[Tensor]], list[Any]] = lambda xs: [  # noqa: E731
            [_copy(part) for part in xs] for _ in xs
        ]
        return self._post(fingerprint.rows_call("all_gather", x, name), x, finish)

    def broadcast(self, x: Tensor, *, root: int = 0, name: str | None = None) -> Work[Tensor]:
        if self.rank == root:
            self._meter.count_to_all(x.numel() * x.element_size())

        def finish(xs: list[Tensor]) -> list[Tensor]:
            for rank, part in enumerate(xs):
                if rank != root:
                    part.detach().copy_(xs[root].detach())
            return xs

        return self._post(fingerprint.broadcast_call(x, root, self.size, name), x, finish)

    def all_to_all(self, xs: Sequence[Tensor], *, name: str | None = None) -> Work[list[Tensor]]:
        for to, x in enumerate(xs[: self.size]):
            self._meter.count_sent(to, x.numel() * x.element_size())
        finish: Callable[[list[Sequence[Tensor]]], list[Any]] = lambda rows: [  # noqa: E731
            [_copy(row[to]) for row in rows] for to in range(len(rows))
        ]
        return self._post(fingerprint.all_to_all_call(xs, self.size, name), list(xs), finish)

    def barrier(self, *, name: str | None = None) -> Work[None]:
        return self._post(CallFingerprint("barrier", name), None, lambda parts: parts)

    def gather_objects(self, obj: Any, *, name: str | None = None) -> list[Any]:
        text, call = fingerprint.objects_call(obj, name)
        everyones: list[str] = self._post(call, text, lambda texts: [texts] * len(texts)).wait()
        return [json.loads(text) for text in everyones]

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        payloads: list[bytes] = self._post(
            CallFingerprint("agree"), bytes(payload), lambda parts: [parts] * len(parts), "agree"
        ).wait()
        return list(payloads)

    def make_subgroup(self, ranks: Sequence[int]) -> ThreadGroup | None:
        def finish(parts: list[None]) -> list[_ThreadBoard]:
            return [
                _ThreadBoard([self.names[rank] for rank in ranks], self.segment.deadline)
            ] * len(parts)

        segment: _ThreadBoard = self._post(
            fingerprint.subgroup_call(ranks, self.size), None, finish
        ).wait()
        if self.rank not in ranks:
            return None
        child = ThreadGroup(
            segment,
            list(ranks).index(self.rank),
            hosts=self._meter.select_hosts(ranks),
            delay=self._delay,
        )
        self._children.append(child)
        return child

    def global_rank(self, rank: int) -> int:
        return self.names[rank]

    @property
    def hosts(self) -> tuple[int, ...]:
        """The host that each rank is taken to be on."""
        return self._meter.hosts

    def share(self, make: Callable[[], T]) -> T:
        """Make one object for all ranks. Collective."""

        def finish(parts: list[None]) -> list[T]:
            return [make()] * len(parts)

        shared: T = self._post(CallFingerprint("share"), None, finish).wait()
        return shared

    def make_pairs(self, device: torch.device) -> Any:
        """Connect the threads in pairs. Collective."""
        from tests.harness.thread_pairs import ThreadPairs  # which is made of groups of this module

        return ThreadPairs(self, device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self._post(
            CallFingerprint("empty", None, tuple(shape), dtype), None, lambda parts: parts
        ).wait()
        with torch.inference_mode(False):
            return torch.empty(tuple(shape), dtype=dtype)

    def close(self) -> None:
        self.leave("it has closed the group")

    def leave(self, why: str) -> None:
        """Close this group and its subgroups; `why` is what others are told that still wait for
        this rank.
        """
        for group in (self, *self._children):
            group.segment.leave(group.rank, why)

    def abort(self) -> None:
        self.end_everywhere(ViewChanged(f"the group was aborted by rank {self.names[self.rank]}"))

    def end_everywhere(self, error: PacelineError) -> PacelineError:
        """End everything under way, on all ranks, with `error`, or with that of the rank that
        was first; return that.
        """
        self.segment.fail(error)
        assert isinstance(self.segment.broken, PacelineError)
        return self.segment.broken


class _Failure(NamedTuple):
    rank: int
    error: BaseException


def spawn(
    size: int,
    body: Callable[[ThreadGroup], T],
    *,
    deadline: float = 30.0,
    hosts: Sequence[int] | None = None,
    delay: Callable[[int], None] | None = None,
) -> list[T]:
    """Run `body(group)` on `size` threads and give their results in rank order.

    The first error of any rank ends the others and is raised. `deadline` bounds each wait in
    seconds.
    """
    if size < 1:
        raise UsageError(f"spawn needs at least one rank, not {size}")
    segment = _ThreadBoard(range(size), deadline)
    results: dict[int, T] = {}
    failures: list[_Failure] = []
    ends = SimpleQueue[int]()

    def run(rank: int) -> None:
        group = ThreadGroup(segment, rank, hosts=hosts, delay=delay)
        try:
            results[rank] = body(group)
        except BaseException as error:  # noqa: BLE001  whatever ends a rank is raised by spawn
            if isinstance(error, DeadlineExceeded):
                error.add_note(_stacks(threads))
            failures.append(_Failure(rank, error))
            group.leave(f"it ended with {type(error).__name__}: {error}")
        else:
            group.leave("its body has returned")
        finally:
            ends.put(rank)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    _join(threads, ends, failures, deadline)
    # a rank that aborts the group for its own error may come here after those that it has ended
    if failures:
        raise next(
            (each.error for each in failures if not isinstance(each.error, ViewChanged)),
            failures[0].error,
        )
    return [results[rank] for rank in range(size)]


def _stacks(threads: Sequence[threading.Thread]) -> str:
    """Return where each of `threads` is at present: the last calls of its stack."""
    frames = sys._current_frames()
    stacks = [(thread.name, frames[thread.ident]) for thread in threads if thread.ident in frames]
    return "\n".join(
        f"{name} is at\n{''.join(traceback.format_stack(frame)[-6:])}" for name, frame in stacks
    )


def _join(
    threads: Sequence[threading.Thread],
    ends: SimpleQueue[int],
    failures: Sequence[_Failure],
    deadline: float,
) -> None:
    """Wait for all threads, each of which tells its end; once one has failed, for the others no
    longer than their waits may last.
    """
    limit = None
    for _ in threads:
        if failures and limit is None:
            limit = time.monotonic() + deadline + 5 * TICK
        try:
            threads[
                ends.get(timeout=None if limit is None else max(limit - time.monotonic(), 0.0))
            ].join()
        except Empty:
            return


def _reduced(op: str, parts: list[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
    reduction_rules.check_operation(op, parts[0][0].dtype)
    total = reduction_rules.reduce_parts(op, [x for x, _ in parts])
    return [total.clone() if out is None else out.copy_(total) for _, out in parts]


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


def _deliver(
    parts: list[tuple[Sequence[tuple[int, Tensor]], Sequence[tuple[int, Tensor]]]],
) -> list[None]:
    """Hand every message over, in the order of the lists, once all are found to match."""
    size = len(parts)
    moves: list[tuple[Tensor, Tensor]] = []
    for source in range(size):
        for to in range(size):
            sent = [x for peer, x in parts[source][0] if peer == to]
            wanted = [x for peer, x in parts[to][1] if peer == source]
            moves += zip(wanted, sent, strict=_matching(source, to, sent, wanted))
    copies = [(into, x.detach().clone()) for into, x in moves]
    for into, x in copies:
        into.detach().copy_(x.reshape(into.shape))
    return cast(list[None], [None] * size)


def _matching(source: int, to: int, sent: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Return True; raise Mismatch if what `source` sends is not what `to` expects."""
    left = [fingerprint.describe_message(x) for x in sent]
    right = [fingerprint.describe_message(x) for x in wanted]
    if left != right:
        sends, expects = ", ".join(left) or "nothing", ", ".join(right) or "nothing"
        raise Mismatch(
            f"exchange: rank {source} sends {sends} to rank {to}, which expects {expects}"
        )
    return True
