"""Finds the memory that torch reduces again and again, and that nobody else has the address of: the buckets of DDP.

A bucket is one storage, which torch's engine reduces from C++, in each backward pass. A tensor of a script may lie in an array of numpy's
as well, or be read through one: what a script reduces by itself stays where it is.
"""

from __future__ import annotations

from types import FrameType

from torch import Tensor
from torch.autograd import graph
from torch.multiprocessing.reductions import StorageWeakRef

from paceline.comm.shm.moving import movable

LEAST = 256 << 10  # bytes from which moving pays
SIGHTS = range(2, 5)  # at which of its reductions a storage may move: DDP makes its buckets anew after the first pass
ENGINE = getattr(getattr(graph, "_engine_run_backward", None), "__code__", None)  # what is under the engine on a thread's stack


class RecurringMemory:
    """The storages that the engine has reduced, and how often."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def may_move(self, x: Tensor, caller: FrameType | None) -> bool:
        """Whether the memory of `x` may move now. `caller`: the frame of Python that its reduction is called from."""
        if caller is None or ENGINE is None or caller.f_code is not ENGINE or not movable(x):
            return False
        storage = x.untyped_storage()
        seen = self._seen.get(storage._cdata)
        if seen is None:
            self._seen = {number: seen for number, seen in self._seen.items() if not seen[0].expired()}
        times = 1 if seen is None else seen[1] + 1
        self._seen[storage._cdata] = (StorageWeakRef(storage) if seen is None else seen[0], times)
        return times in SIGHTS
