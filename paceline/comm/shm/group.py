"""The group inside one host: CPU tensors through shared memory, a barrier of counters, torch's own
vector operations on slices.

`segment` has the memory and the counters, `waiting` the waits, `queue` the operations under way,
`reductions` the sums, `messages` what is sent from one rank to another.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from ctypes import memmove
from math import prod
from typing import Any

import torch
from torch import Tensor

from paceline.comm.cancellation import CancelScope
from paceline.comm.fingerprint import (
    MOVING,
    OWN,
    CallFingerprint,
    choosing,
    dealing,
    exchanging,
    matching,
    objects,
    on_device,
    parcel,
    reducing,
    rooted,
    rows,
)
from paceline.comm.group import Group, Op, Traffic, Work
from paceline.comm.reduction import crossing
from paceline.comm.shm import reductions
from paceline.comm.shm.memory import PAGE, fresh
from paceline.comm.shm.messages import ALL, Landing, WindowMessage, deliver, flat, plain
from paceline.comm.shm.moving import MovedMemory, movable
from paceline.comm.shm.queue import WorkQueue
from paceline.comm.shm.registered import MemoryRegistry, RegisteredMemory
from paceline.comm.shm.segment import SMALL, ControlSegment, Steps
from paceline.errors import Mismatch, PacelineError, UsageError, ViewChanged


class SharedGroup:
    """The workers of one host, exchanging CPU tensors through shared memory (a `Group`).

    A `Mismatch` or `UsageError` is raised by all ranks at the same call, and the group goes on.
    After any other error it is broken: that call and all later ones raise it, on all ranks; a
    `Work.wait` with a timeout of its own may be tried again. `segment` is the mapped control
    segment of this group; `SharedGroup.from_store` makes it.
    """

    def __init__(
        self,
        segment: ControlSegment,
        *,
        view: int = 0,
        relatives: Relatives | None = None,
        registered: MemoryRegistry | None = None,
    ) -> None:
        self.segment = segment
        self.rank, self.size, self.view = segment.rank, segment.size, view
        self.traffic = Traffic()
        self._queue = WorkQueue(segment, relatives if relatives is not None else [])
        self._borrowed = registered is not None
        self._registered = MemoryRegistry() if registered is None else registered
        self._moved = MovedMemory()

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
        cancel_scope: CancelScope | None = None,
    ) -> SharedGroup:
        """Meet over a store (`put(key, obj)`, `take(key, timeout)`); rank 0 makes the segment.

        `folder`: files there instead of memfd. `ranks`: our ranks in the group of all workers, by
        which messages name them.
        """
        names = tuple(range(size)) if ranks is None else ranks
        return cls(
            ControlSegment.from_store(
                store, rank, names, deadline=deadline, folder=folder, cancel_scope=cancel_scope
            ),
            view=view,
        )

    @property
    def waited(self) -> float:
        """Seconds spent waiting for ranks that came later."""
        return self.segment.watch.waited

    # ---- reductions

    def all_reduce(
        self, x: Tensor, *, op: Op = "sum", name: str | None = None, out: Tensor | None = None
    ) -> Work[Tensor]:
        call = _here(reducing("all_reduce", x, op, name, out), x)
        nbytes = x.numel() * x.element_size()
        self._count_all_reduce(nbytes)
        if (
            out is not None
            and not call.flaw
            and nbytes > SMALL
            and out.data_ptr() == x.data_ptr()
            and plain(x)
            and plain(out)
        ):
            place = self._registered.place(x)
            if place is not None or self._registered.aside(x):
                # In place on every rank, if it is the same place everywhere.
                where = (
                    OWN
                    if place is None
                    else f"in registered memory {place.number} at {x.data_ptr() - place.start}"
                )
                return self._queue.start(
                    call,
                    self._reduce_in_place(x, out, place, op, call._replace(place=where)),
                    [out],
                )
        return self._queue.start(call, self._reduce(x, out, op, call), () if out is None else [out])

    def _count_all_reduce(self, nbytes: int) -> None:
        self.traffic.within += 2 * nbytes * (self.size - 1) // self.size

    def _reduce(
        self,
        x: Tensor,
        out: Tensor | None,
        op: Op,
        call: CallFingerprint,
        meeting: Steps | None = None,
    ) -> Steps:
        """Reduce through stages.

        `meeting`: how ranks meet for it, where they have more to tell than the call.
        """
        meeting = self.segment.meet(call) if meeting is None else meeting
        if call.flaw:
            yield from meeting
        result = fresh(x.shape, x.dtype) if out is None else out
        source = flat(x)
        direct = plain(result) and not crossing(source, result)
        target = result.detach().view(-1) if direct else fresh(source.shape, source.dtype)
        reduce = (
            reductions.all_reduce_small
            if x.numel() * x.element_size() <= SMALL
            else reductions.all_reduce
        )
        yield from reduce(self.segment, source, target, op, meeting)
        if not direct:
            result.detach().copy_(target.view(result.shape))
        return result

    def _reduce_in_place(
        self, x: Tensor, out: Tensor, place: RegisteredMemory | None, op: Op, call: CallFingerprint
    ) -> Steps:
        elsewhere = yield from self.segment.meet(call)
        if elsewhere or place is None:
            return (yield from self._reduce(x, out, op, call._replace(place="")))
        key, plans = (x.data_ptr(), x.numel(), x.dtype), self._registered.plans
        plan = plans.get(key)
        if plan is None:
            if len(plans) >= 256:
                plans.clear()
            plan = plans[key] = reductions.plan(x.detach().view(-1), place, self.rank)
        yield from reductions.all_reduce_registered(self.segment, x, plan, op)
        return out

    def all_reduce_moving(
        self, x: Tensor, *, op: Op = "sum", may_move: bool, whole: Tensor | None = None
    ) -> Work[Tensor]:
        """Reduce in place.

        The memory of `x` is moved to where all ranks reach it, if all of them allow that: see
        `moving.movable`.

        `whole`: the tensor that `x` is a part of, as long on all ranks, which is moved then.
        """
        nbytes = x.numel() * x.element_size()
        if nbytes <= SMALL:
            return self.all_reduce(x, op=op, out=x)
        call = _here(reducing("all_reduce", x, op, None, x), x)._replace(place=MOVING)
        self._count_all_reduce(nbytes)
        return self._queue.start(
            call,
            self._reduce_moving(x, op, call, (x if whole is None else whole) if may_move else None),
            [x],
        )

    def _reduce_moving(
        self, x: Tensor, op: Op, call: CallFingerprint, whole: Tensor | None
    ) -> Steps:
        try:
            return (yield from self._reduce_there(x, op, call, whole))
        except (Mismatch, UsageError):  # on all ranks at the same place
            raise
        except BaseException:
            # the end of the group, too: others may be about to write to x, or in the middle of it
            self._moved.withdraw(x)
            raise

    def _reduce_there(
        self, x: Tensor, op: Op, call: CallFingerprint, whole: Tensor | None
    ) -> Steps:
        moved = None if call.flaw or not plain(x) else self._moved.find(x)
        lies = (
            None
            if moved is None or moved.place is None
            else [moved.place.number, x.data_ptr() - moved.place.start]
        )
        free = (
            not call.flaw and moved is None and not self._moved.refused and not self.segment.named
        )
        moves = whole is not None and free and movable(whole)
        if moved is None and not moves:
            return (yield from self._reduce(x, x, op, call, self._meet_moving(call)))
        sides = yield from self.segment.meet(call, [lies, moves])
        if whole is not None and all(other for _, other in sides):
            moved = yield from self._moved.move(self.segment, whole, call)
        elif any(other != lies for other, _ in sides):
            moved = None
        if moved is None:
            return (yield from self._reduce(x, x, op, call))
        yield from reductions.all_reduce_registered(self.segment, x, moved.plan(x, self.rank), op)
        return x

    def _meet_moving(self, call: CallFingerprint) -> Steps:
        """Meet for a tensor that lies in memory of its own and stays there; once more if that of
        others doesn't, who ask for it.
        """
        here = [None, False]
        sides = yield from self.segment.meet(call, here)
        if any(side != here for side in sides):
            yield from self.segment.meet(call)

    def reduce_scatter(self, x: Tensor, *, op: Op = "sum", name: str | None = None) -> Work[Tensor]:
        return self._reduce_scatter(x, op, _here(reducing("reduce_scatter", x, op, name), x), None)

    def reduce_scatter_into(
        self, x: Tensor, out: Tensor, *, op: Op = "sum", name: str | None = None
    ) -> Work[Tensor]:
        """Reduce `x` and write piece `rank` to `out`, contiguous and 1-D, as long as `pieces`
        says.
        """
        return self._reduce_scatter(x, op, _here(reducing("reduce_scatter", x, op, name), x), out)

    def _reduce_scatter(
        self, x: Tensor, op: Op, call: CallFingerprint, out: Tensor | None
    ) -> Work[Tensor]:
        self.traffic.within += x.numel() * x.element_size() * (self.size - 1) // self.size

        def steps() -> Steps:
            if call.flaw:
                yield from self.segment.meet(call)
            return (yield from reductions.reduce_scatter(self.segment, flat(x), op, call, out))

        return self._queue.start(call, steps(), () if out is None else [out])

    # ---- messages

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        *,
        tag: int = 0,
    ) -> Work[None]:
        call = _here(exchanging(sends, recvs, tag, self.size), *(x for _, x in (*sends, *recvs)))
        outgoing = self._outgoing(call, sends)
        sides = (
            [[[peer, parcel(x)] for peer, x in side] for side in (sends, recvs)]
            if not call.flaw
            else None
        )

        def land(metas: list[Any]) -> Landing:
            matching(metas, self.segment.names)
            return [
                (source, flat(x) if plain(x) else fresh(x.shape, x.dtype)) for source, x in recvs
            ]

        def steps() -> Steps:
            landed = yield from deliver(self.segment, outgoing, call, sides, land)
            for (_, x), (_, landing) in zip(recvs, landed, strict=True):
                if not plain(x):
                    x.detach().copy_(landing)

        return self._queue.start(call, steps(), [x for _, x in recvs])

    def all_gather(self, x: Tensor, *, name: str | None = None) -> Work[list[Tensor]]:
        return self._all_gather(x, _here(rows("all_gather", x, name), x), [])

    def all_gather_into(
        self, x: Tensor, outs: Sequence[Tensor], *, name: str | None = None
    ) -> Work[list[Tensor]]:
        """Gather every rank's `x` into `outs`, one contiguous tensor for each rank, of the shape
        and dtype of `x`.
        """
        call = _here(rows("all_gather", x, name), x)
        return self._all_gather(x, call._replace(shape=tuple(x.shape)), list(outs))

    def _all_gather(
        self, x: Tensor, call: CallFingerprint, outs: list[Tensor]
    ) -> Work[list[Tensor]]:
        outgoing = self._outgoing(call, [(ALL, x)])

        def land(shapes: list[Any]) -> Landing:
            if not outs:
                outs.extend(fresh(shape, x.dtype) for shape in shapes)
            if outs[self.rank].data_ptr() != x.data_ptr():
                outs[self.rank].copy_(x.detach())
            return [(r, out) for r, out in enumerate(outs) if r != self.rank]

        def steps() -> Steps:
            yield from deliver(self.segment, outgoing, call, list(x.shape), land)
            return outs

        return self._queue.start(call, steps(), tuple(outs))

    def broadcast(self, x: Tensor, *, root: int = 0, name: str | None = None) -> Work[Tensor]:
        call = _here(rooted(x, root, self.size, name), x)
        outgoing = self._outgoing(call, [(ALL, x)] if self.rank == root else [])
        nbytes = x.numel() * x.element_size()
        place, where = (
            self._lies(x) if nbytes > SMALL and plain(x) and not call.flaw else (None, None)
        )
        landing = x.detach() if call.flaw or plain(x) else fresh(x.shape, x.dtype)
        places: list[Any] = []  # where every rank's lies, if all ranks reach it

        def land(metas: list[Any]) -> Landing:
            places[:] = metas
            return [] if self.rank == root or metas[root] is not None else [(root, landing)]

        def steps() -> Steps:
            yield from deliver(self.segment, outgoing if place is None else [], call, where, land)
            if (
                places[root] is not None
                and place is not None
                and all(other == where for other in places)
            ):
                if self.rank != root:  # taken where it lies
                    memmove(
                        landing.data_ptr(),
                        place.regions[root].data_ptr() + landing.data_ptr() - place.start,
                        nbytes,
                    )
                self.segment.post()
                yield self.segment.posted
            elif places[root] is not None:
                yield from deliver(
                    self.segment,
                    outgoing,
                    call,
                    None,
                    lambda _: [] if self.rank == root else [(root, landing)],
                )
            if self.rank != root and not plain(x):
                x.detach().copy_(landing)
            return x

        return self._queue.start(call, steps(), [x])

    def _lies(self, x: Tensor) -> tuple[RegisteredMemory | None, list[int | bool] | None]:
        """Return the memory that all ranks reach and `x` lies in, if any, and what tells on each
        rank where that is.
        """
        place, moved = self._registered.place(x), self._moved.find(x)
        found = place if place is not None or moved is None else moved.place
        return found, None if found is None else [
            place is None,
            found.number,
            x.data_ptr() - found.start,
        ]

    def all_to_all(self, xs: Sequence[Tensor], *, name: str | None = None) -> Work[list[Tensor]]:
        call = _here(dealing(xs, self.size, name), *xs)
        outgoing = self._outgoing(call, [(to, x) for to, x in enumerate(xs) if to != self.rank])
        outs: list[Tensor] = []

        def land(shapes: list[Any]) -> Landing:
            outs.extend(fresh(mine[self.rank], xs[0].dtype) for mine in shapes)
            outs[self.rank].copy_(xs[self.rank].detach())
            return [(r, out) for r, out in enumerate(outs) if r != self.rank]

        def steps() -> Steps:
            yield from deliver(self.segment, outgoing, call, [list(x.shape) for x in xs], land)
            return outs

        return self._queue.start(call, steps())

    def _outgoing(
        self, call: CallFingerprint, sends: Sequence[tuple[int, Tensor]]
    ) -> list[WindowMessage]:
        """Prepare the messages to send, copied where they don't lie in one stretch; none if the
        call has a flaw.
        """
        messages = [] if call.flaw else [WindowMessage(to, flat(x)) for to, x in sends]
        for message in messages:
            self.traffic.within += message.nbytes * (self.size - 1 if message.to == ALL else 1)
        return messages

    def barrier(self, *, name: str | None = None) -> Work[None]:
        call = CallFingerprint("barrier", name)

        def steps() -> Steps:
            yield from self.segment.meet(call)

        return self._queue.start(call, steps())

    # ---- the control channel, groups within, memory

    def agree(self, payload: bytes) -> list[bytes]:
        return self._agree(payload, CallFingerprint("agree"))

    def _agree(self, payload: bytes, call: CallFingerprint) -> list[bytes]:
        if self.segment.watch.broken is not None:
            raise self.segment.watch.broken
        return self.segment.agree(payload, call)

    def gather_objects(self, obj: Any, *, name: str | None = None) -> list[Any]:
        text, call = objects(obj, name)
        return [json.loads(answer) for answer in self._agree(text.encode(), call)]

    def sub(self, ranks: Sequence[int]) -> Group | None:
        call = choosing(ranks, self.size)
        self._agree(b"", call)
        segment = self.segment.sub(list(ranks), call)
        if segment is None:
            return None
        everyone = list(ranks) == list(range(self.size))  # whose regions lie in the same order
        registered = self._registered if everyone else None
        return SharedGroup(
            segment, view=self.view, relatives=self._queue.relatives, registered=registered
        )

    def reach(self, other: SharedGroup) -> None:
        """Have broadcasts find what `other`, a group of the same ranks, has moved; this one
        itself moves nothing then.
        """
        self._moved = other._moved

    def global_rank(self, rank: int) -> int:
        return self.segment.names[rank]

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate registered memory: all-reduced in place without a copy.

        `ResourceError` on all ranks when this host has no room.
        """
        call = CallFingerprint("empty", None, tuple(shape), dtype)
        self._agree(b"", call)
        length = max(-(-prod(shape) * dtype.itemsize // PAGE) * PAGE, PAGE)
        segment = self.segment.allocate(length * self.size, call)
        regions = [segment.tensor(r * length, (length,), torch.uint8) for r in range(self.size)]
        self._registered.add(regions[self.rank].data_ptr(), regions)
        return segment.tensor(self.rank * length, tuple(shape), dtype)

    def stand_in(self, x: Tensor) -> None:
        """Use `x` on this rank in the place of registered memory of the same length, in which
        others may still have theirs.
        """
        self._registered.lay_aside(x)

    def release(self, x: Tensor) -> None:
        """Forget the registered memory that `x` lies in, or stands in for, if any; it goes when
        its last tensor does.
        """
        self._registered.forget(x)

    def close(self) -> None:
        self.segment.watch.close(ViewChanged("this group has been closed"))
        self._cancel()

    def abort(self) -> None:
        """End every pending Work with an error; the other ranks find out when they wait."""
        self.end(
            ViewChanged(f"this group has been aborted by rank {self.segment.names[self.rank]}")
        )

    def end(self, error: PacelineError) -> PacelineError:
        """End everything under way, on all ranks, with `error`, or with that of the rank that
        was first; return that.
        """
        ended = self.segment.watch.end(error)
        self._cancel()
        return ended

    def _cancel(self) -> None:
        self._queue.cancel()
        self._moved.clear()
        if not self._borrowed:
            self._registered.clear()


Relatives = list[weakref.ref[WorkQueue]]


def _here(call: CallFingerprint, *xs: Tensor) -> CallFingerprint:
    """Return `call`, with the flaw of tensors that don't lie in this host's memory."""
    away = [x for x in xs if x.device.type != "cpu"]
    if not away or call.flaw:
        return call
    flaw = (
        f"shared memory moves CPU tensors, got one{on_device(away[0])}; use a group with backend "
        "'nccl', or x.cpu()"
    )
    return call._replace(flaw=flaw)
