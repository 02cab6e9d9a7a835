"""Moves memory of tensors, in place, to where all ranks of a host reach it, so sums need no copy.

    storage of x     rank 0   own memory    ->  segment 0, which rank 1 maps too
    (x, its views)   rank 1   own memory    ->  segment 1, which rank 0 maps too

A tensor and all its views keep their storage object; torch swaps the memory behind it. The old
memory stays readable, but empty, as long as the storage lives, in case something has noted its
address. Each rank forgets by itself the storages that have gone. Ranks compare at each call where a
tensor lies; if it is not at the same place everywhere, it is reduced as ordinary tensors are.

The memory stays with its storage when the group ends. If a reduction breaks off in the middle, the
storage gets its old memory back, as other ranks may still write to the shared one. A process that
is forked later writes to a copy.
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
from paceline.comm.shm import shared_reductions
from paceline.comm.shm.registered import RegisteredMemory
from paceline.comm.shm.segment import ControlSegment
from paceline.comm.shm.shared_segment import SharedSegment, discard_pages, make_writes_private
from paceline.errors import ResourceError

# Private to torch, from 2.13 on: it exchanges the memory of two storages. Without it nothing moves.
SWAPS = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
KEPT_PLANS = 256  # plans of one storage
Storage = Any  # torch's stubs don't know all of a storage


def is_movable(x: Tensor) -> bool:
    """Whether the memory of `x` may be moved.

    `x` must have all of a storage that torch itself has allocated, and that no array of numpy looks
    into. Whether something else holds its address can't be known here.
    """
    storage = x.untyped_storage()
    has_all = x.is_contiguous() and storage.nbytes() == x.numel() * x.element_size() > 0
    # Once an array of numpy looks into a storage, torch doesn't resize it any more.
    is_own = storage.resizable() and not storage.is_shared()
    return SWAPS and has_all and is_own and type(x) is Tensor and not x.is_conj() and not x.is_neg()


class MovedStorage:
    """A storage that has been moved.

    Args:
        place: Its new memory on all ranks.
        file: Device and inode of the file that its new memory is mapped from.
        before: Its old memory.
    """

    def __init__(self, place: RegisteredMemory, file: tuple[int, int], before: Storage) -> None:
        self.start, self.before, self._file = place.start, before, file
        self.place: RegisteredMemory | None = place  # None once the group has ended
        self._plans: dict[tuple[int, int, torch.dtype], shared_reductions.ReductionPlan] = {}

    def is_memory_of(self, storage: Storage) -> bool:
        """Whether `storage` still has that memory.

        The address alone is not enough: it may be that of a later mapping.
        """
        return (
            storage.data_ptr() == self.start
            and storage.is_shared()
            and _file_identity(storage) == self._file
        )

    def plan_reduction(self, x: Tensor, rank: int) -> shared_reductions.ReductionPlan:
        """Plan the reduction of `x`, which lies here. Plans are kept."""
        assert self.place is not None
        key = (x.data_ptr(), x.numel(), x.dtype)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= KEPT_PLANS:
                self._plans.clear()
            plan = self._plans[key] = shared_reductions.plan_registered(
                x.detach().view(-1), self.place, rank
            )
        return plan

    def forget_others(self) -> None:
        """Forget the memory of the other ranks."""
        self.place = None
        self._plans.clear()


class MovedMemory:
    """The storages that a group has moved, numbered in the same order on all ranks."""

    def __init__(self) -> None:
        self._made = 0
        # Torch keeps one Python object for each storage, as long as the storage lives. So an entry
        # goes with its storage, and no later storage can be taken for it.
        self._storages: WeakKeyDictionary[Storage, MovedStorage] = WeakKeyDictionary()
        self.refused = False  # whether a rank had no memory to move to; the same on all ranks

    def find_moved(self, x: Tensor) -> MovedStorage | None:
        """Find the storage of `x` if it was moved, and still has that memory."""
        if not self._storages:
            return None
        storage: Storage = x.untyped_storage()
        moved = self._storages.get(storage)
        return (
            moved
            if moved is not None and moved.place is not None and moved.is_memory_of(storage)
            else None
        )

    def clear(self) -> None:
        """Forget the memory of other ranks. Storages keep the memory that they have."""
        for moved in tuple(self._storages.values()):
            moved.forget_others()

    def move_back(self, x: Tensor) -> None:
        """Give `x` its old memory back, with its values. No other rank reaches that."""
        moved, storage = self.find_moved(x), x.untyped_storage()
        if moved is not None:
            moved.before.copy_(storage)
            _swap_memory(storage, moved.before)
            moved.forget_others()

    def move_storage(
        self, segment: ControlSegment, x: Tensor, call: CallFingerprint
    ) -> Generator[int, None, MovedStorage | None]:
        """Move the storage of `x`, which is `is_movable` on all ranks.

        Collective. None, on all ranks and from now on, if one of them can't.
        """
        nbytes = x.numel() * x.element_size()
        own: SharedSegment | None = None
        into: Storage = None
        regions: list[Any] | None = None
        try:
            try:
                own, into = _make_memory(nbytes)
            except ResourceError as error:
                _warn_of_copies(error)
            # First meeting: all ranks learn where each rank's new memory is.
            addresses = yield from segment.meet(call, "" if own is None else own.address)
            try:
                regions = _open(addresses, nbytes, segment.rank) if all(addresses) else None
            except ResourceError as error:
                _warn_of_copies(error)
            # Copy the values before the second meeting, after which other ranks read them.
            if own is not None and regions is not None:
                own.view_tensor(0, (x.numel(),), x.dtype).copy_(x.detach().view(-1))
            # Second meeting: either all ranks have mapped everything, or none moves.
            reached = yield from segment.meet(call, regions is not None)
        finally:
            if own is not None:
                own.seal()
        if not all(reached) or own is None or regions is None:
            self.refused = True
            return None
        regions[segment.rank] = own
        return self._swap_in(
            x.untyped_storage(),
            into,
            [region.view_tensor(0, (nbytes,), torch.uint8) for region in regions],
        )

    def _swap_in(self, storage: Storage, into: Storage, regions: list[Tensor]) -> MovedStorage:
        """Swap the memory of `storage` and `into`, and note where it is."""
        # Once. The table outlives this group: it holds the old memory of storages that do.
        if not self._made:
            os.register_at_fork(after_in_child=partial(_make_writes_private, self._storages))
        _swap_memory(storage, into)
        discard_pages(into.data_ptr(), into.nbytes())
        place = RegisteredMemory(self._made, storage.data_ptr(), regions)
        self._made += 1
        moved = self._storages[storage] = MovedStorage(place, _file_identity(storage), into)
        return moved


def _swap_memory(storage: Storage, other: Storage) -> None:
    # Private to torch: see SWAPS.
    storage._swap_data_ptr_(other)


def _file_identity(storage: Storage) -> tuple[int, int]:
    """Identify the file without a name that a storage is mapped from, by device and inode.

    Zeros if it is not mapped from one.
    """
    # Private to torch: torch.multiprocessing uses it to send a storage to another process.
    try:
        stat = os.fstat(storage._get_shared_fd())
    except RuntimeError:
        return 0, 0
    return stat.st_dev, stat.st_ino


def _make_memory(nbytes: int) -> tuple[SharedSegment, Storage]:
    """Make this rank's new memory, mapped twice.

    The tensor keeps one of the mappings, and has it for itself.
    """
    segment = SharedSegment.create(nbytes)
    if segment.named:
        segment.seal()
        raise ResourceError(
            "this system has no unnamed shared memory, and a killed process would leave named "
            "memory behind"
        )
    return segment, segment.map_again()


def _open(addresses: list[str], nbytes: int, me: int) -> list[Any]:
    """Map the memory of the other ranks."""
    return [
        None if rank == me else SharedSegment.open(address, nbytes)
        for rank, address in enumerate(addresses)
    ]


def _warn_of_copies(error: ResourceError) -> None:
    warnings.warn(
        f"{error}; sums of this group go on through copies, which take longer", stacklevel=2
    )


def _make_writes_private(storages: WeakKeyDictionary[Storage, MovedStorage]) -> None:
    """Make moved storages private to this process, which was forked: no other sees its writes."""
    for storage, moved in tuple(storages.items()):
        if moved.is_memory_of(storage):
            make_writes_private(moved.start, storage.nbytes(), storage._get_shared_fd())
