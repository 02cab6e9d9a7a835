"""How one tensor is all-reduced or broadcast inside a host: by stages, in place, or after a move.

through stages   any tensor: copied to the segment, block by block, or at once if it is small
in place         large tensors in registered memory, at the same place on all ranks
moving           large tensors of code that knows nothing of registered memory: their memory is
                 moved there in the first call, and reduced in place from then on
"""

from __future__ import annotations

from ctypes import memmove
from typing import Any

from torch import Tensor

from paceline.comm.fingerprint import CallFingerprint
from paceline.comm.group_protocol import Op
from paceline.comm.reduction_rules import is_allowed, overlaps_partly
from paceline.comm.shm import shared_reductions
from paceline.comm.shm.moving import MovedMemory, is_movable
from paceline.comm.shm.registered import MemoryRegistry, RegisteredMemory
from paceline.comm.shm.segment import ControlSegment, Steps
from paceline.comm.shm.shared_segment import empty_on_cpu
from paceline.comm.shm.window_messages import (
    Landing,
    WindowMessage,
    deliver_messages,
    flatten_values,
    is_plain,
)
from paceline.errors import Mismatch, UsageError

BY_MESSAGES = 32 << 10  # most bytes of a broadcast that goes by messages from wherever it lies


class AllReducePaths:
    """The ways of an all-reduce and a broadcast, as steps for the work queue.

    Args:
        segment: The control segment of the group.
        registered: Memory that all ranks of the host reach. None: none so far.
    """

    def __init__(self, segment: ControlSegment, registered: MemoryRegistry | None) -> None:
        self._segment = segment
        self.registered = MemoryRegistry() if registered is None else registered
        self.moved = MovedMemory()

    def reduce_through_stages(
        self,
        x: Tensor,
        out: Tensor | None,
        op: Op,
        call: CallFingerprint,
        meeting: Steps | None = None,
    ) -> Steps:
        """Reduce through stages.

        `meeting`: steps in which ranks meet for it. Default: they compare the call.
        """
        if call.flaw:
            yield from self._segment.meet(call)  # raises the flaw on all ranks
        result = empty_on_cpu(x.shape, x.dtype) if out is None else out
        source = flatten_values(x)
        # Sum right into the result if its elements are in order and it holds no unread part of `x`.
        direct = is_plain(result) and not overlaps_partly(source, result)
        target = result.detach().view(-1) if direct else empty_on_cpu(source.shape, source.dtype)
        is_small = x.numel() * x.element_size() <= self._segment.small
        if meeting is None and is_small and is_allowed(op, x.dtype):
            yield from shared_reductions.all_reduce_small(self._segment, source, target, op, call)
        else:
            meeting = self._segment.meet(call) if meeting is None else meeting
            yield from shared_reductions.all_reduce_staged(
                self._segment, source, target, op, meeting
            )
        if not direct:
            result.detach().copy_(target.view(result.shape))
        return result

    def reduce_in_place(
        self, x: Tensor, out: Tensor, place: RegisteredMemory | None, op: Op, call: CallFingerprint
    ) -> Steps:
        # Where calls differ in the place alone, meeting returns the places: then use stages.
        elsewhere = yield from self._segment.meet(call)
        if elsewhere or place is None:
            return (yield from self.reduce_through_stages(x, out, op, call._replace(place="")))
        key, plans = (x.data_ptr(), x.numel(), x.dtype), self.registered.plans
        plan = plans.get(key)
        if plan is None:
            if len(plans) >= 256:
                plans.clear()
            plan = plans[key] = shared_reductions.plan_registered(
                x.detach().view(-1), place, self._segment.rank
            )
        yield from shared_reductions.all_reduce_registered(self._segment, x, plan, op)
        return out

    def reduce_moving(
        self, x: Tensor, op: Op, call: CallFingerprint, whole: Tensor | None
    ) -> Steps:
        try:
            return (yield from self._reduce_where_moved(x, op, call, whole))
        except (Mismatch, UsageError):  # raised by all ranks at the same place: none of them writes
            raise
        # Anything else, the end of the group as well: other ranks may be writing to `x`, or about
        # to. It gets its old memory back, which they don't reach.
        except BaseException:
            self.moved.move_back(x)
            raise

    def _reduce_where_moved(
        self, x: Tensor, op: Op, call: CallFingerprint, whole: Tensor | None
    ) -> Steps:
        # `own_place` says where `x` is if it was moved before; `may_move` whether it may move now.
        moved = None if call.flaw or not is_plain(x) else self.moved.find_moved(x)
        own_place = (
            None
            if moved is None or moved.place is None
            else [moved.place.number, x.data_ptr() - moved.place.start]
        )
        is_free_to_move = (
            not call.flaw and moved is None and not self.moved.refused and not self._segment.named
        )
        may_move = whole is not None and is_free_to_move and is_movable(whole)
        # A rank that neither moved `x` nor may move it meets in `_meet_moving`, which has the same
        # meetings as the lines below have for the others.
        if moved is None and not may_move:
            return (yield from self.reduce_through_stages(x, x, op, call, self._meet_moving(call)))
        sides = yield from self._segment.meet(call, [own_place, may_move])
        if whole is not None and all(other for _, other in sides):
            moved = yield from self.moved.move_storage(self._segment, whole, call)
        elif any(other != own_place for other, _ in sides):
            moved = None
        if moved is None:
            return (yield from self.reduce_through_stages(x, x, op, call))
        yield from shared_reductions.all_reduce_registered(
            self._segment, x, moved.plan_reduction(x, self._segment.rank), op
        )
        return x

    def _meet_moving(self, call: CallFingerprint) -> Steps:
        """Meet for a tensor in memory of its own, which stays there.

        If another rank's tensor was moved, or may move, that rank meets a second time.
        """
        own_side = [None, False]
        sides = yield from self._segment.meet(call, own_side)
        if any(side != own_side for side in sides):
            yield from self._segment.meet(call)

    # ---- broadcast

    def broadcast(
        self, x: Tensor, root: int, call: CallFingerprint, outgoing: list[WindowMessage]
    ) -> Steps:
        """Copy the root's `x` to all ranks: from its memory if all reach it, else by messages."""
        nbytes, rank = x.numel() * x.element_size(), self._segment.rank
        place, own_place = (
            self._find_place(x)
            if nbytes > BY_MESSAGES and is_plain(x) and not call.flaw
            else (None, None)
        )
        landing = x.detach() if call.flaw or is_plain(x) else empty_on_cpu(x.shape, x.dtype)
        places: list[Any] = []  # the place of every rank's tensor, if all ranks reach it

        def land(metas: list[Any]) -> Landing:
            places[:] = metas
            return [] if rank == root or metas[root] is not None else [(root, landing)]

        messages = outgoing if place is None else []
        yield from deliver_messages(self._segment, messages, call, own_place, land)
        # The root's tensor is in memory that all reach: copy from there, without its help. The post
        # tells it when all have done so.
        if (
            places[root] is not None
            and place is not None
            and all(other == own_place for other in places)
        ):
            if rank != root:
                start = place.regions[root].data_ptr() + landing.data_ptr() - place.start
                memmove(landing.data_ptr(), start, nbytes)
            self._segment.post()
            yield self._segment.posted
        # The root has sent nothing, but places differ: it sends now.
        elif places[root] is not None:
            sources = [] if rank == root else [(root, landing)]
            yield from deliver_messages(self._segment, outgoing, call, None, lambda _: sources)
        if rank != root and not is_plain(x):
            x.detach().copy_(landing)
        return x

    def _find_place(self, x: Tensor) -> tuple[RegisteredMemory | None, list[int | bool] | None]:
        """Find the memory of `x` if all ranks reach it, and name the place for a comparison."""
        registered, moved = self.registered.find_place(x), self.moved.find_moved(x)
        place = registered if registered is not None or moved is None else moved.place
        return place, None if place is None else [
            registered is None,
            place.number,
            x.data_ptr() - place.start,
        ]

    def share_moved_memory(self, other: AllReducePaths) -> None:
        """Use memory that `other`, of a group of the same ranks, has moved; move nothing here."""
        self.moved = other.moved

    def clear(self, *, registered: bool) -> None:
        """Forget moved memory; with `registered`, registered memory as well."""
        self.moved.clear()
        if registered:
            self.registered.clear()
