"""Memory of tensors that is moved, in place, to where all ranks of a host reach it: reduced from
then on without a copy.

    storage of x     rank 0   own memory    ->  segment 0, which rank 1 maps too
    (x, its views)   rank 1   own memory    ->  segment 1, which rank 0 maps too

A tensor and all its views keep their storage, in which torch swaps what it points to. What was
there before stays readable, empty, as long as the storage lives, for whoever has noted its address.
Each rank forgets on its own what has gone: where a tensor lies is compared at each call, and what
doesn't lie at the same place everywhere is reduced as ordinary tensors are.

The memory stays with its storage when the group ends. It goes back to this rank alone where a
reduction breaks off in the middle, as others may write there still; and a process that is forked
later writes to a copy.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from paceline.comm.fingerprint import CallFingerprint
from paceline.comm.shm import reductions
from paceline.comm.shm.memory import SharedSegment, discard, keep_writes
from paceline.comm.shm.registered import RegisteredMemory
from paceline.comm.shm.segment import ControlSegment
from paceline.errors import ResourceError

SWAPS = hasattr(torch.UntypedStorage, "_swap_data_ptr_")  # torch from 2.13 on
KEPT_PLANS = 256  # of one storage
Storage = Any  # torch's stubs don't know all of a storage


def movable(x: Tensor) -> bool:
    """Whether `x` has all of a storage that torch itself has allocated, and no array of numpy looks
    into, so that it can be moved.

    Whether others have its address isn't known.
    """
    storage = x.untyped_storage()
    whole = x.is_contiguous() and storage.nbytes() == x.numel() * x.element_size() > 0
    # arrays look into what torch doesn't resize any more
    own = storage.resizable() and not storage.is_shared()
    return SWAPS and whole and own and type(x) is Tensor and not x.is_conj() and not x.is_neg()


class MovedStorage:
    """What is known of a storage that has been moved: the `place` of its new memory on all
    ranks, and the memory it had `before`.
    """

    def __init__(self, place: RegisteredMemory, file: tuple[int, int], before: Storage) -> None:
        self.start, self.before, self._file = place.start, before, file
        self.place: RegisteredMemory | None = place  # until the group ends
        self._plans: dict[tuple[int, int, torch.dtype], reductions.ReductionPlan] = {}

    def holds(self, storage: Storage) -> bool:
        """Whether that memory is what `storage` has: the same address alone might be that of
        something later.
        """
        return (
            storage.data_ptr() == self.start
            and storage.is_shared()
            and _file(storage) == self._file
        )

    def plan(self, x: Tensor, rank: int) -> reductions.ReductionPlan:
        """Plan the reduction of `x`, which lies here."""
        assert self.place is not None
        key = (x.data_ptr(), x.numel(), x.dtype)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= KEPT_PLANS:
                self._plans.clear()
            plan = self._plans[key] = reductions.plan(x.detach().view(-1), self.place, rank)
        return plan

    def forget(self) -> None:
        """Forget where the memory of the other ranks is."""
        self.place = None
        self._plans.clear()


class MovedMemory:
    """The storages that a group has moved, in the same order on all ranks."""

    def __init__(self) -> None:
        self._made = 0
        # Torch keeps the object of a storage as long as the storage: an entry goes with that, and
        # no later one can be taken for it.
        self._storages: WeakKeyDictionary[Storage, MovedStorage] = WeakKeyDictionary()
        self.refused = False  # on all ranks, as one of them has no memory to move to

    def find(self, x: Tensor) -> MovedStorage | None:
        """Find the storage of `x`, if it was moved and has that memory still."""
        if not self._storages:
            return None
        storage: Storage = x.untyped_storage()
        found = self._storages.get(storage)
        return (
            found
            if found is not None and found.place is not None and found.holds(storage)
            else None
        )

    def clear(self) -> None:
        """Forget the memory of the others; storages keep that which they have."""
        for moved in tuple(self._storages.values()):
            moved.forget()

    def withdraw(self, x: Tensor) -> None:
        """Take `x` and its values back to the memory of before, which nobody else reaches."""
        moved, storage = self.find(x), x.untyped_storage()
        if moved is not None:
            moved.before.copy_(storage)
            _swap(storage, moved.before)
            moved.forget()

    def move(
        self, segment: ControlSegment, x: Tensor, call: CallFingerprint
    ) -> Generator[int, None, MovedStorage | None]:
        """Move the storage of `x`, which is `movable` on all ranks; None, on all and from then
        on, where one of them can't.
        """
        nbytes = x.numel() * x.element_size()
        mine: SharedSegment | None = None
        into: Storage = None
        regions: list[Any] | None = None
        try:
            try:
                mine, into = _make(nbytes)
            except ResourceError as error:
                _tell(error)
            addresses = yield from segment.meet(call, "" if mine is None else mine.address)
            try:
                regions = _open(addresses, nbytes, segment.rank) if all(addresses) else None
            except ResourceError as error:
                _tell(error)
            if mine is not None and regions is not None:  # before the others may read it
                mine.tensor(0, (x.numel(),), x.dtype).copy_(x.detach().view(-1))
            reached = yield from segment.meet(call, regions is not None)
        finally:
            if mine is not None:
                mine.seal()
        if not all(reached) or mine is None or regions is None:
            self.refused = True
            return None
        regions[segment.rank] = mine
        return self._take(
            x.untyped_storage(),
            into,
            [region.tensor(0, (nbytes,), torch.uint8) for region in regions],
        )

    def _take(self, storage: Storage, into: Storage, regions: list[Tensor]) -> MovedStorage:
        """Give a storage the memory of `into`, and that the memory it had."""
        # what is held there holds `before` of storages that outlive this group, too
        if not self._made:
            os.register_at_fork(after_in_child=partial(_keep_writes, self._storages))
        _swap(storage, into)
        discard(into.data_ptr(), into.nbytes())
        place = RegisteredMemory(self._made, storage.data_ptr(), regions)
        self._made += 1
        moved = self._storages[storage] = MovedStorage(place, _file(storage), into)
        return moved


def _swap(storage: Storage, other: Storage) -> None:
    storage._swap_data_ptr_(other)


def _file(storage: Storage) -> tuple[int, int]:
    """Return what identifies the file without a name that a storage is mapped from, as long as
    it is mapped; zeros if it isn't from one.
    """
    try:
        stat = os.fstat(storage._get_shared_fd())
    except RuntimeError:
        return 0, 0
    return stat.st_dev, stat.st_ino


def _make(nbytes: int) -> tuple[SharedSegment, Storage]:
    """Make this rank's new memory, mapped twice: once for the tensor alone, with which that
    mapping goes.
    """
    segment = SharedSegment.create(nbytes)
    if segment.named:
        segment.seal()
        raise ResourceError(
            "this system has no shared memory without a name, which a killed process would leave "
            "behind"
        )
    return segment, segment.again()


def _open(addresses: list[str], nbytes: int, me: int) -> list[Any]:
    """Map the memory of the other ranks."""
    return [
        None if rank == me else SharedSegment.open(address, nbytes)
        for rank, address in enumerate(addresses)
    ]


def _tell(error: ResourceError) -> None:
    warnings.warn(
        f"{error}; sums of this group go on through copies, which take longer", stacklevel=2
    )


def _keep_writes(storages: WeakKeyDictionary[Storage, MovedStorage]) -> None:
    """Let what this process, which was forked, writes to storages that were moved be seen by
    nobody else.
    """
    for storage, moved in tuple(storages.items()):
        if moved.holds(storage):
            keep_writes(moved.start, storage.nbytes(), storage._get_shared_fd())
