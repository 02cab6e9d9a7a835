"""The memory of buckets, which p.grad lies in. What a script keeps of it (gs = [p.grad for p in ps]) stays: other memory is taken then.

    backward   bucket in memory 0                 p.grad are views of it
    the script keeps some of them, or views of them, or arrays
    backward   memory 0 is held: in memory 1      the kept ones are what they were
    the script lets go
    backward   memory 0 is free: in memory 0

Memory 0 is the one that all workers sum fastest. Each worker looks and chooses for itself. Who holds a view is seen by its count of
references, who holds something made of it by that of the storage, which nobody but the views has; both are private to Python and torch,
and are compared with what they were when nobody could hold anything.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.buckets import Bucket


class MemoryMaker(Protocol):
    """The part of a `Reducer` that makes memory to stand in for a bucket's, and hears of memory that isn't used any more."""

    def beside(self, numel: int, dtype: torch.dtype) -> Tensor: ...

    def release(self, flat: Tensor) -> None: ...


@functools.cache
def _of_grad() -> int:
    """What being the gradient of a parameter adds to a tensor's count of references."""
    parameter, grad = Parameter(torch.zeros(1)), torch.zeros(1)
    before = sys.getrefcount(grad)
    parameter.grad = grad
    return sys.getrefcount(grad) - before


class BucketCopy:
    """One memory of a bucket: `flat` is summed, `homes` have the bucket's number and the view of each parameter, which is handed out."""

    def __init__(self, index: int, bucket: Bucket, flat: Tensor) -> None:
        self.flat = flat
        shown = torch.from_dlpack(flat)  # type: ignore[attr-defined]  # the same memory, in a storage of its own
        start = bucket.flat.storage_offset()
        self.views = tuple(shown.as_strided(v.size(), v.stride(), v.storage_offset() - start) for v in bucket.views)
        self.homes = [(index, view) for view in self.views]
        self._storage = shown.untyped_storage()
        del shown
        self._uses, self._counts = self._used(), self._counted()

    def _used(self) -> int:
        return torch._C._storage_Use_Count(self._storage._cdata)

    def _counted(self) -> list[int]:
        return list(map(sys.getrefcount, self.views))

    def held(self, parameters: Sequence[Tensor]) -> bool:
        """Whether anybody but their gradients has something of it."""
        if self._used() != self._uses:
            return True
        counts = self._counted()
        if counts == self._counts:
            return False
        more = [n for n, (count, usual) in enumerate(zip(counts, self._counts, strict=True)) if count > usual]
        extra = _of_grad()
        return any(counts[n] - self._counts[n] > (extra if parameters[n].grad is self.views[n] else 0) for n in more)


class BucketCopies:
    """All memory of one bucket, and which of it is in use."""

    def __init__(self, index: int, bucket: Bucket, parameters: Sequence[Tensor], maker: MemoryMaker) -> None:
        self._index, self._bucket, self._parameters, self._maker = index, bucket, parameters, maker
        self._all = [BucketCopy(index, bucket, bucket.flat)]
        self.memory = self._all[0]

    def renew(self) -> bool:
        """The bucket is about to be written: take other memory where something of this is kept, or where the first is free; whether so."""
        first, now = self._all[0], self.memory
        if not first.held(self._parameters):
            self.memory = first
            return now is not first
        if now is not first and not now.held(self._parameters):
            return False
        free = [memory for memory in self._all[1:] if memory is not now and not memory.held(self._parameters)]
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
        other = self._maker.beside(flat.numel(), flat.dtype) if flat.device.type == "cpu" else torch.empty_like(flat)
        return BucketCopy(self._index, self._bucket, other.zero_())

    def close(self) -> None:
        """None of it is used any more; it goes when nobody holds anything of it."""
        for memory in self._all:
            self._maker.release(memory.flat)


class BucketMemory:
    """The shelves of all buckets: `buckets` and `home` (of each parameter: its bucket and its view) say what memory is in use."""

    def __init__(
        self, buckets: list[Bucket], home: list[tuple[int, Tensor] | None], parameters: Sequence[Tensor], maker: MemoryMaker
    ) -> None:
        self._buckets, self._home = buckets, home
        self._all = [BucketCopies(index, bucket, [parameters[n] for n in bucket.members], maker) for index, bucket in enumerate(buckets)]
        for index in range(len(buckets)):
            self._take(index)

    def renew(self) -> None:
        """All buckets are about to be written."""
        for index, shelf in enumerate(self._all):
            if shelf.renew():
                self._take(index)

    def _take(self, index: int) -> None:
        bucket, memory = self._buckets[index], self._all[index].memory
        self._buckets[index] = bucket._replace(flat=memory.flat, views=memory.views)
        for number, home in zip(bucket.members, memory.homes, strict=True):
            self._home[number] = home

    def close(self) -> None:
        """No bucket is used any more."""
        for shelf in self._all:
            shelf.close()
