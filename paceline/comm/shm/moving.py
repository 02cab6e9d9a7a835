"""Memory of tensors that is moved, in place, to where all ranks of a host reach it: reduced from then on without a copy.

    storage of x     rank 0   own memory    ->  segment 0, which rank 1 maps too
    (x, its views)   rank 1   own memory    ->  segment 1, which rank 0 maps too

A tensor and all its views keep their storage, in which torch swaps what it points to. What was there before stays readable, empty, as long
as the storage lives, for whoever has noted its address. Each rank forgets on its own what has gone: where a tensor lies is compared at each
call, and what doesn't lie at the same place everywhere is reduced as ordinary tensors are.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from paceline.comm.fingerprint import CallFingerprint
from paceline.comm.shm import reductions
from paceline.comm.shm.memory import SharedSegment, discard
from paceline.comm.shm.registered import RegisteredMemory
from paceline.comm.shm.segment import ControlSegment
from paceline.errors import ResourceError

SWAPS = hasattr(torch.UntypedStorage, "_swap_data_ptr_")  # torch from 2.13 on
KEPT_PLANS = 256  # of one storage


def movable(x: Tensor) -> bool:
    """Whether `x` has all of a storage that torch itself has allocated, which can be moved. Whether others have its address isn't known."""
    storage = x.untyped_storage()
    whole = x.is_contiguous() and storage.nbytes() == x.numel() * x.element_size() > 0
    own = storage.resizable() and not storage.is_shared()
    return SWAPS and whole and own and type(x) is Tensor and not x.is_conj() and not x.is_neg()


class MovedStorage:
    """A storage that has been moved: the `place` of its new memory on all ranks, and the memory it had `before`."""

    def __init__(self, owner: StorageWeakRef, place: RegisteredMemory, before: Any) -> None:
        self.owner, self.place, self._before = owner, place, before
        self._plans: dict[tuple[int, int, torch.dtype], reductions.ReductionPlan] = {}

    def plan(self, x: Tensor, rank: int) -> reductions.ReductionPlan:
        """Plan the reduction of `x`, which lies here."""
        key = (x.data_ptr(), x.numel(), x.dtype)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= KEPT_PLANS:
                self._plans.clear()
            plan = self._plans[key] = reductions.plan(x.detach().view(-1), self.place, rank)
        return plan


class MovedMemory:
    """The storages that a group has moved, in the same order on all ranks."""

    def __init__(self) -> None:
        self._made = 0
        self._storages: dict[int, MovedStorage] = {}  # by what identifies a storage while somebody has a reference, weak or not

    def find(self, x: Tensor) -> MovedStorage | None:
        """Find the storage of `x`, if it was moved and is still there."""
        if not self._storages:
            return None
        storage = x.untyped_storage()
        found = self._storages.get(storage._cdata)
        if found is not None and storage.data_ptr() != found.place.start:  # it has been given other memory since
            del self._storages[storage._cdata]
            return None
        return found

    def sweep(self) -> None:
        """Forget the storages that are gone; their memory goes when no rank has it any more."""
        for number, moved in tuple(self._storages.items()):
            if moved.owner.expired():
                del self._storages[number]

    def clear(self) -> None:
        """Forget all; storages keep the memory that they have."""
        self._storages.clear()

    def move(self, segment: ControlSegment, x: Tensor, call: CallFingerprint) -> Generator[int, None, MovedStorage | None]:
        """Move the storage of `x`, which is `movable` on all ranks; None, on all, where one of them can't."""
        nbytes = x.numel() * x.element_size()
        self.sweep()
        mine, into = _make(nbytes)
        try:
            addresses = yield from segment.meet(call, "" if mine is None else mine.address)
            regions = _open(addresses, nbytes, segment.rank) if all(addresses) else None
            if mine is not None and regions is not None:  # before the others may read it
                mine.tensor(0, (x.numel(),), x.dtype).copy_(x.detach().view(-1))
            reached = yield from segment.meet(call, regions is not None)
        finally:
            if mine is not None:
                mine.seal()
        if not all(reached) or mine is None or into is None or regions is None:
            return None
        regions[segment.rank] = mine
        storage: Any = x.untyped_storage()  # torch's stubs don't know how to swap
        storage._swap_data_ptr_(into)
        discard(into.data_ptr(), nbytes)  # what the storage had before
        place = RegisteredMemory(self._made, storage.data_ptr(), [region.tensor(0, (nbytes,), torch.uint8) for region in regions])
        self._made += 1
        moved = self._storages[storage._cdata] = MovedStorage(StorageWeakRef(storage), place, into)
        return moved


def _make(nbytes: int) -> tuple[SharedSegment | None, Any]:
    """Make this rank's new memory, mapped twice: once for the tensor alone, with which that mapping goes. None, None where it can't be."""
    try:
        segment = SharedSegment.create(nbytes)
        if segment.named:  # files have names that outlive a killed process, and little room
            segment.seal()
            return None, None
        return segment, segment.again()
    except ResourceError:
        return None, None


def _open(addresses: list[str], nbytes: int, me: int) -> list[Any] | None:
    """Map the memory of the other ranks; None where it can't be."""
    try:
        return [None if rank == me else SharedSegment.open(address, nbytes) for rank, address in enumerate(addresses)]
    except ResourceError:
        return None
