"""Memory of buckets, which p.grad lies in.

If a script keeps some of it (gs = [p.grad for p in ps]), buckets move to other memory.

    backward   bucket in memory 0                 p.grad are views of it
    the script keeps some of them, or views of them, or arrays
    backward   memory 0 is held: in memory 1      the kept ones are what they were
    the script drops them
    backward   memory 0 is free: in memory 0

Memory 0 is the one that all workers sum fastest. Each worker looks and chooses for itself. Python's
reference count shows whether a view is held, and torch's count of uses of the storage, which only
the views share, whether anything made of a view is. Both counts are private, and are compared with
what they were when nothing could hold the memory.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.bucket_layout import Bucket


class MemoryMaker(Protocol):
    """The part of a `Reducer` that makes substitutes for bucket memory, and takes back unused
    ones.
    """

    def beside(self, numel: int, dtype: torch.dtype) -> Tensor: ...

    def release(self, flat: Tensor) -> None: ...


@functools.cache
def _of_grad() -> int:
    """Number of references that a tensor gains when it becomes the gradient of a parameter."""
    parameter, grad = Parameter(torch.zeros(1)), torch.zeros(1)
    before = sys.getrefcount(grad)
    parameter.grad = grad
    return sys.getrefcount(grad) - before


class BucketCopy:
    """One memory of a bucket.

    `flat` is summed; `homes` has, for each parameter, the bucket's number and the view to be handed
    out.
    """

    def __init__(self, index: int, bucket: Bucket, flat: Tensor) -> None:
        self.flat = flat
        # the same memory, in a storage of its own
        shown = torch.from_dlpack(flat)  # type: ignore[attr-defined]
        start = bucket.flat.storage_offset()
        self.views = tuple(
            shown.as_strided(v.size(), v.stride(), v.storage_offset() - start) for v in bucket.views
        )
        self.homes = [(index, view) for view in self.views]
        self._storage = shown.untyped_storage()
        del shown
        self._uses, self._counts = self._used(), self._counted()

    def _used(self) -> int:
        return torch._C._storage_Use_Count(self._storage._cdata)

    def _counted(self) -> list[int]:
        return list(map(sys.getrefcount, self.views))

    def held(self, parameters: Sequence[Tensor]) -> bool:
        """Whether anything but the gradients of these parameters refers to this memory."""
        if self._used() != self._uses:
            return True
        counts = self._counted()
        if counts == self._counts:
            return False
        more = [
            n
            for n, (count, usual) in enumerate(zip(counts, self._counts, strict=True))
            if count > usual
        ]
        extra = _of_grad()
        return any(
            counts[n] - self._counts[n] > (extra if parameters[n].grad is self.views[n] else 0)
            for n in more
        )


class BucketCopies:
    """All memories of one bucket, and which of them is in use."""

    def __init__(
        self, index: int, bucket: Bucket, parameters: Sequence[Tensor], maker: MemoryMaker
    ) -> None:
        self._index, self._bucket, self._parameters, self._maker = index, bucket, parameters, maker
        self._all = [BucketCopy(index, bucket, bucket.flat)]
        self.memory = self._all[0]

    def renew(self) -> bool:
        """Choose memory for a bucket that is about to be written; return whether it changed.

        It is the first memory if that is free, else one that nothing holds.
        """
        first, now = self._all[0], self.memory
        if not first.held(self._parameters):
            self.memory = first
            return now is not first
        if now is not first and not now.held(self._parameters):
            return False
        free = [
            memory
            for memory in self._all[1:]
            if memory is not now and not memory.held(self._parameters)
        ]
        if not free:
            free = [self._make()]
            self._all += free
        self.memory, *surplus = free
        for memory in surplus:
            self._all.remove(memory)
            self._maker.release(memory.flat)
        return True

    def _make(self) -> BucketCopy:
        flat = self._bucket.flat
        other = (
            self._maker.beside(flat.numel(), flat.dtype)
            if flat.device.type == "cpu"
            else torch.empty_like(flat)
        )
        return BucketCopy(self._index, self._bucket, other.zero_())

    def close(self) -> None:
        """Release all memories; each is freed once nothing holds it."""
        for memory in self._all:
            self._maker.release(memory.flat)


class BucketMemory:
    """The memories of all buckets.

    It keeps `buckets` and `home` (of each parameter: its bucket and its view) up to date.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        home: list[tuple[int, Tensor] | None],
        parameters: Sequence[Tensor],
        maker: MemoryMaker,
    ) -> None:
        self._buckets, self._home = buckets, home
        self._all = [
            BucketCopies(index, bucket, [parameters[n] for n in bucket.members], maker)
            for index, bucket in enumerate(buckets)
        ]
        for index in range(len(buckets)):
            self._take(index)

    def renew(self) -> None:
        """Choose memory for all buckets, which are about to be written."""
        for index, shelf in enumerate(self._all):
            if shelf.renew():
                self._take(index)

    def _take(self, index: int) -> None:
        bucket, memory = self._buckets[index], self._all[index].memory
        self._buckets[index] = bucket._replace(flat=memory.flat, views=memory.views)
        for number, home in zip(bucket.members, memory.homes, strict=True):
            self._home[number] = home

    def close(self) -> None:
        """Release the memory of all buckets."""
        for shelf in self._all:
            shelf.close()
