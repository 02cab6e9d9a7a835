"""Memory of buckets: gradients that a script keeps are never overwritten.

    backward   bucket lies in memory 0            each p.grad is a view of it
    the script keeps gradients (gs = [p.grad for p in ps]), or views or arrays of them
    backward   memory 0 is held: use memory 1     the kept gradients keep their values
    the script drops them
    backward   memory 0 is free: use memory 0

All workers sum memory 0 fastest. Each worker chooses its memory without telling the others. Two
counts show whether memory is held: Python's reference count of each view, and torch's use count of
the storage. Only the views share the storage, so anything made from a view raises its use count.
Both counts are compared with their values from when nothing else could hold the memory.
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
    """The part of a `Reducer` that makes further memory for buckets, and takes it back."""

    def allocate_substitute(self, numel: int, dtype: torch.dtype) -> Tensor: ...

    def release_memory(self, flat: Tensor) -> None: ...


# Measured, not assumed: it depends on how torch keeps the Python object of a gradient alive.
@functools.cache
def _count_grad_references() -> int:
    """Number of references that a tensor gains when it becomes the gradient of a parameter."""
    parameter, grad = Parameter(torch.zeros(1)), torch.zeros(1)
    before = sys.getrefcount(grad)
    parameter.grad = grad
    return sys.getrefcount(grad) - before


class BucketCopy:
    """One memory of a bucket.

    `flat` is the tensor that is summed. `homes` has one pair per parameter of the bucket: index of
    the bucket, and the view that becomes p.grad.
    """

    def __init__(self, index: int, bucket: Bucket, flat: Tensor) -> None:
        self.flat = flat
        # The same memory in a storage of its own, so that the use count of `flat` doesn't matter.
        own_storage = torch.from_dlpack(flat)  # type: ignore[attr-defined]
        start = bucket.flat.storage_offset()
        self.views = tuple(
            own_storage.as_strided(view.size(), view.stride(), view.storage_offset() - start)
            for view in bucket.views
        )
        self.homes = [(index, view) for view in self.views]
        self._storage = own_storage.untyped_storage()
        # This tensor would count as a use of the storage.
        del own_storage
        self._free_storage_uses, self._free_references = (
            self._count_storage_uses(),
            self._count_references(),
        )

    def _count_storage_uses(self) -> int:
        # Private: breaks if torch no longer counts the tensors of a storage in its StorageImpl.
        return torch._C._storage_Use_Count(self._storage._cdata)

    def _count_references(self) -> list[int]:
        return list(map(sys.getrefcount, self.views))

    def is_held(self, parameters: Sequence[Tensor]) -> bool:
        """Whether anything but the gradients of these parameters refers to this memory."""
        if self._count_storage_uses() != self._free_storage_uses:
            return True
        counts = self._count_references()
        if counts == self._free_references:
            return False
        raised = [
            index
            for index, (count, usual) in enumerate(zip(counts, self._free_references, strict=True))
            if count > usual
        ]
        # A view that is p.grad has these references more, and that is its normal use.
        grad_references = _count_grad_references()
        return any(
            counts[index] - self._free_references[index]
            > (grad_references if parameters[index].grad is self.views[index] else 0)
            for index in raised
        )


class BucketCopies:
    """All memories of one bucket, and which of them is in use."""

    def __init__(
        self, index: int, bucket: Bucket, parameters: Sequence[Tensor], maker: MemoryMaker
    ) -> None:
        self._index, self._bucket, self._parameters, self._maker = index, bucket, parameters, maker
        self._copies = [BucketCopy(index, bucket, bucket.flat)]
        self.current = self._copies[0]

    def choose_memory(self) -> bool:
        """Choose memory for a bucket that is about to be written; say whether it changed.

        The first memory is chosen if it is free, else another one that is.
        """
        first, current = self._copies[0], self.current
        if not first.is_held(self._parameters):
            self.current = first
            return current is not first
        if current is not first and not current.is_held(self._parameters):
            return False
        free = [
            memory
            for memory in self._copies[1:]
            if memory is not current and not memory.is_held(self._parameters)
        ]
        if not free:
            free = [self._allocate_copy()]
            self._copies += free
        # One is enough: further free ones are left from a script that kept many at a time.
        self.current, *surplus = free
        for memory in surplus:
            self._copies.remove(memory)
            self._maker.release_memory(memory.flat)
        return True

    def _allocate_copy(self) -> BucketCopy:
        flat = self._bucket.flat
        further = (
            self._maker.allocate_substitute(flat.numel(), flat.dtype)
            if flat.device.type == "cpu"
            else torch.empty_like(flat)
        )
        # Zeros, as gaps between the views are summed too.
        return BucketCopy(self._index, self._bucket, further.zero_())

    def close(self) -> None:
        """Release all memories. Each is freed when nothing holds it any more."""
        for memory in self._copies:
            self._maker.release_memory(memory.flat)


class BucketMemory:
    """The memories of all buckets.

    Args:
        buckets: All buckets; entries are replaced when a bucket moves to other memory.
        home: Index of the bucket and view of each parameter; None without one. Updated likewise.
        parameters: All parameters, in the order of `home`.
        maker: Makes further memory on the CPU.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        home: list[tuple[int, Tensor] | None],
        parameters: Sequence[Tensor],
        maker: MemoryMaker,
    ) -> None:
        self._buckets, self._home = buckets, home
        self._copies_by_bucket = [
            BucketCopies(index, bucket, [parameters[n] for n in bucket.members], maker)
            for index, bucket in enumerate(buckets)
        ]
        for index in range(len(buckets)):
            self._move_bucket(index)

    def choose_memory(self) -> None:
        """Choose memory for all buckets, which are about to be written."""
        for index, copies in enumerate(self._copies_by_bucket):
            if copies.choose_memory():
                self._move_bucket(index)

    def _move_bucket(self, index: int) -> None:
        bucket, memory = self._buckets[index], self._copies_by_bucket[index].current
        self._buckets[index] = bucket._replace(flat=memory.flat, views=memory.views)
        for parameter_index, home in zip(bucket.members, memory.homes, strict=True):
            self._home[parameter_index] = home

    def close(self) -> None:
        """Release the memory of all buckets."""
        for copies in self._copies_by_bucket:
            copies.close()
