"""The group inside one host: CPU tensors in shared memory, moved and added by C.

`segment` has the memory and its counters, `waiting` the waits, `work_queue` the operations under
way, `shared_reductions` and `small_all_reduce` the sums, and `window_messages` all messages from
one rank to another.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from paceline.comm.cancellation import CancelScope
from paceline.comm.fingerprint import (
    MOVING,
    OWN,
    CallFingerprint,
    all_to_all_call,
    broadcast_call,
    check_messages_match,
    describe_message,
    device_suffix,
    exchange_call,
    objects_call,
    reduction_call,
    rows_call,
    subgroup_call,
)
from paceline.comm.group_protocol import Group, Op, Traffic, Work
from paceline.comm.shm import shared_reductions
from paceline.comm.shm.all_reduce_paths import AllReducePaths
from paceline.comm.shm.registered import MemoryRegistry
from paceline.comm.shm.segment import ControlSegment, Steps
from paceline.comm.shm.shared_segment import PAGE, empty_on_cpu
from paceline.comm.shm.small_all_reduce import SmallCalls
from paceline.comm.shm.window_messages import (
    ALL,
    Landing,
    WindowMessage,
    deliver_messages,
    flatten_values,
    is_plain,
)
from paceline.comm.shm.work_queue import WorkQueue
from paceline.errors import PacelineError, ViewChanged


class SharedGroup:
    """The workers of one host, which exchange CPU tensors through shared memory (a `Group`).

    All ranks raise a `Mismatch` or `UsageError` at the same call, and the group goes on. Any other
    error breaks the group: all ranks raise it, in that call and in all later ones. A `Work.wait`
    with a timeout of its own may be tried again.

    `SharedGroup.from_store` makes a group.

    Args:
        segment: The control segment, mapped by all ranks.
        view: Number of the membership. Default: 0.
        relatives: Queues of the group's subgroups and of the group it comes from. Default: none.
        registered: Registered memory that is shared with another group. Default: none.
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
        self._small_calls = SmallCalls(self._queue)
        self._shares_registered = registered is not None  # another group of the same ranks owns it
        self._paths = AllReducePaths(segment, registered)
        self._registered = self._paths.registered

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
        """Make the group of one host: rank 0 makes the segment, and all meet over a store.

        Args:
            store: Has `put(key, obj)` and `take(key, timeout)`.
            rank: This rank.
            size: Number of ranks.
            deadline: Seconds that a wait may take. Default: 120.
            view: Number of the membership. Default: 0.
            folder: Folder of files in place of memfd. Default: memfd.
            ranks: Rank of each member among all workers, for messages. Default: 0 to size - 1.
            cancel_scope: Ends waits of the group when it trips. Default: none.
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
        """Seconds spent waiting for slower ranks."""
        return self.segment.watch.waited

    # ---- reductions

    def all_reduce(
        self, x: Tensor, *, op: Op = "sum", name: str | None = None, out: Tensor | None = None
    ) -> Work[Tensor]:
        small = self._small_calls.start(x, op, name, out)
        if small is not None:
            _count_all_reduce(self.traffic, x.nbytes, self.size)
            return small
        call = _check_device(reduction_call("all_reduce", x, op, name, out), x)
        nbytes = x.numel() * x.element_size()
        _count_all_reduce(self.traffic, nbytes, self.size)
        if (
            out is not None
            and not call.flaw
            and nbytes > self.segment.small
            and out.data_ptr() == x.data_ptr()
            and is_plain(x)
            and is_plain(out)
        ):
            place = self._registered.find_place(x)
            if place is not None or self._registered.is_aside(x):
                # In place on every rank, if `x` is at the same place on all of them.
                where = (
                    OWN
                    if place is None
                    else f"in registered memory {place.number} at {x.data_ptr() - place.start}"
                )
                return self._queue.start_work(
                    call,
                    self._paths.reduce_in_place(x, out, place, op, call._replace(place=where)),
                    [out],
                )
        return self._queue.start_work(
            call, self._paths.reduce_through_stages(x, out, op, call), () if out is None else [out]
        )

    def all_reduce_moving(
        self, x: Tensor, *, op: Op = "sum", may_move: bool, whole: Tensor | None = None
    ) -> Work[Tensor]:
        """Reduce `x` in place, and move its memory first if all ranks allow it.

        Args:
            x: As in `all_reduce`.
            op: As in `all_reduce`. Default: "sum".
            may_move: Whether nothing else holds the address of `x`: see `moving.is_movable`.
            whole: The tensor to move, which `x` is a part of, as long on all ranks. Default: `x`.
        """
        nbytes = x.numel() * x.element_size()
        if nbytes <= self.segment.small:
            return self.all_reduce(x, op=op, out=x)
        call = _check_device(reduction_call("all_reduce", x, op, None, x), x)._replace(place=MOVING)
        _count_all_reduce(self.traffic, nbytes, self.size)
        to_move = (x if whole is None else whole) if may_move else None
        return self._queue.start_work(
            call,
            self._paths.reduce_moving(x, op, call, to_move),
            [x],
        )

    def reduce_scatter(self, x: Tensor, *, op: Op = "sum", name: str | None = None) -> Work[Tensor]:
        return self.reduce_scatter_into(x, None, op=op, name=name)

    def reduce_scatter_into(
        self, x: Tensor, out: Tensor | None, *, op: Op = "sum", name: str | None = None
    ) -> Work[Tensor]:
        """Reduce `x` and write piece `rank` to `out`, as `WritesResults` describes.

        `out`: None for a new tensor.
        """
        call = _check_device(reduction_call("reduce_scatter", x, op, name), x)
        self.traffic.within += x.numel() * x.element_size() * (self.size - 1) // self.size

        def steps() -> Steps:
            if call.flaw:
                yield from self.segment.meet(call)
            return (
                yield from shared_reductions.reduce_scatter_staged(
                    self.segment, flatten_values(x), op, call, out
                )
            )

        return self._queue.start_work(call, steps(), () if out is None else [out])

    # ---- messages

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        *,
        tag: int = 0,
    ) -> Work[None]:
        call = _check_device(
            exchange_call(sends, recvs, tag, self.size), *(x for _, x in (*sends, *recvs))
        )
        outgoing = self._prepare_messages(call, sends)
        sides = (
            [[[peer, describe_message(x)] for peer, x in side] for side in (sends, recvs)]
            if not call.flaw
            else None
        )

        def land(metas: list[Any]) -> Landing:
            check_messages_match(metas, self.segment.names)
            return [
                (source, flatten_values(x) if is_plain(x) else empty_on_cpu(x.shape, x.dtype))
                for source, x in recvs
            ]

        def steps() -> Steps:
            landed = yield from deliver_messages(self.segment, outgoing, call, sides, land)
            for (_, x), (_, landing) in zip(recvs, landed, strict=True):
                if not is_plain(x):
                    x.detach().copy_(landing)

        return self._queue.start_work(call, steps(), [x for _, x in recvs])

    def all_gather(self, x: Tensor, *, name: str | None = None) -> Work[list[Tensor]]:
        return self.all_gather_into(x, None, name=name)

    def all_gather_into(
        self, x: Tensor, outs: Sequence[Tensor] | None, *, name: str | None = None
    ) -> Work[list[Tensor]]:
        """Gather every rank's `x` into `outs`: contiguous tensors of the shape and dtype of `x`.

        `outs`: None for new tensors, each of the number of rows that its rank has.
        """
        call = _check_device(rows_call("all_gather", x, name), x)
        if outs is not None:
            call = call._replace(shape=tuple(x.shape))
        outgoing, gathered = self._prepare_messages(call, [(ALL, x)]), list(outs or ())

        def land(shapes: list[Any]) -> Landing:
            if outs is None:
                gathered.extend(empty_on_cpu(shape, x.dtype) for shape in shapes)
            if gathered[self.rank].data_ptr() != x.data_ptr():
                gathered[self.rank].copy_(x.detach())
            return [(r, out) for r, out in enumerate(gathered) if r != self.rank]

        def steps() -> Steps:
            yield from deliver_messages(self.segment, outgoing, call, list(x.shape), land)
            return gathered

        return self._queue.start_work(call, steps(), tuple(gathered))

    def broadcast(self, x: Tensor, *, root: int = 0, name: str | None = None) -> Work[Tensor]:
        call = _check_device(broadcast_call(x, root, self.size, name), x)
        outgoing = self._prepare_messages(call, [(ALL, x)] if self.rank == root else [])
        return self._queue.start_work(call, self._paths.broadcast(x, root, call, outgoing), [x])

    def all_to_all(self, xs: Sequence[Tensor], *, name: str | None = None) -> Work[list[Tensor]]:
        call = _check_device(all_to_all_call(xs, self.size, name), *xs)
        outgoing = self._prepare_messages(
            call, [(to, x) for to, x in enumerate(xs) if to != self.rank]
        )
        outs: list[Tensor] = []

        def land(shapes: list[Any]) -> Landing:
            outs.extend(empty_on_cpu(rank_shapes[self.rank], xs[0].dtype) for rank_shapes in shapes)
            outs[self.rank].copy_(xs[self.rank].detach())
            return [(r, out) for r, out in enumerate(outs) if r != self.rank]

        def steps() -> Steps:
            yield from deliver_messages(
                self.segment, outgoing, call, [list(x.shape) for x in xs], land
            )
            return outs

        return self._queue.start_work(call, steps())

    def _prepare_messages(
        self, call: CallFingerprint, sends: Sequence[tuple[int, Tensor]]
    ) -> list[WindowMessage]:
        """Prepare messages, copied if elements are out of order. None if the call has a flaw."""
        messages = [] if call.flaw else [WindowMessage(to, flatten_values(x)) for to, x in sends]
        for message in messages:
            self.traffic.within += message.nbytes * (self.size - 1 if message.to == ALL else 1)
        return messages

    def barrier(self, *, name: str | None = None) -> Work[None]:
        call = CallFingerprint("barrier", name)

        def steps() -> Steps:
            yield from self.segment.meet(call)

        return self._queue.start_work(call, steps())

    # ---- the control channel, groups within, memory

    def gather_bytes(self, payload: bytes, *, call: CallFingerprint | None = None) -> list[bytes]:
        """Gather a short message of each rank, if all of them make the same call."""
        if self.segment.watch.broken is not None:
            raise self.segment.watch.broken
        return self.segment.gather_bytes(payload, call or CallFingerprint("agree"))

    def gather_objects(self, obj: Any, *, name: str | None = None) -> list[Any]:
        text, call = objects_call(obj, name)
        return [json.loads(answer) for answer in self.gather_bytes(text.encode(), call=call)]

    def make_subgroup(self, ranks: Sequence[int]) -> Group | None:
        call = subgroup_call(ranks, self.size)
        self.gather_bytes(b"", call=call)
        segment = self.segment.make_subsegment(list(ranks), call)
        if segment is None:
            return None
        everyone = list(ranks) == list(range(self.size))  # then regions are in the same order
        registered = self._registered if everyone else None
        return SharedGroup(
            segment, view=self.view, relatives=self._queue.relatives, registered=registered
        )

    def share_moved_memory(self, other: SharedGroup) -> None:
        """Use memory that `other`, a group of the same ranks, has moved; move nothing here."""
        self._paths.share_moved_memory(other._paths)

    def global_rank(self, rank: int) -> int:
        return self.segment.names[rank]

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate registered memory, which is all-reduced in place without a copy.

        `ResourceError` on all ranks if the host has no room. Collective.
        """
        call = CallFingerprint("empty", None, tuple(shape), dtype)
        self.gather_bytes(b"", call=call)
        length = max(-(-prod(shape) * dtype.itemsize // PAGE) * PAGE, PAGE)
        segment = self.segment.allocate_segment(length * self.size, call)
        regions = [
            segment.view_tensor(r * length, (length,), torch.uint8) for r in range(self.size)
        ]
        self._registered.add_memory(regions[self.rank].data_ptr(), regions)
        return segment.view_tensor(self.rank * length, tuple(shape), dtype)

    def stand_in(self, x: Tensor) -> None:
        """Use `x` in place of this rank's registered memory.

        It has the same length; other ranks may still use theirs.
        """
        self._registered.lay_aside(x)

    def release(self, x: Tensor) -> None:
        """Forget the registered memory that `x` is in or replaces. Its last tensor frees it."""
        self._registered.forget_memory(x)

    def close(self) -> None:
        self.segment.watch.close(ViewChanged("this group has been closed"))
        self._queue.cancel_all()
        self._paths.clear(registered=not self._shares_registered)

    def abort(self) -> None:
        """End every pending Work with an error. Other ranks notice when they wait."""
        self.end_everywhere(
            ViewChanged(f"this group has been aborted by rank {self.segment.names[self.rank]}")
        )

    def end_everywhere(self, error: PacelineError) -> PacelineError:
        """End everything under way on all ranks, and return the error that all of them raise.

        It is `error`, or the error of the rank that ended the group first.
        """
        ended = self.segment.watch.end_everywhere(error)
        self._queue.cancel_all()
        self._paths.clear(registered=not self._shares_registered)
        return ended


Relatives = list[weakref.ref[WorkQueue]]


def _count_all_reduce(traffic: Traffic, nbytes: int, size: int) -> None:
    """Count what one rank sends of a tensor: its pieces to the others, and its sum to them."""
    traffic.within += 2 * nbytes * (size - 1) // size


def _check_device(call: CallFingerprint, *xs: Tensor) -> CallFingerprint:
    """Add a flaw to `call` if a tensor is not in this host's memory."""
    away = [x for x in xs if x.device.type != "cpu"]
    if not away or call.flaw:
        return call
    flaw = (
        f"shared memory moves CPU tensors, got one{device_suffix(away[0])}; "
        "use a group with backend 'nccl', or x.cpu()"
    )
    return call._replace(flaw=flaw)
