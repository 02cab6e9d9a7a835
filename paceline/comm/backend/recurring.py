"""Finds memory that torch reduces again and again and whose address no script has: DDP's buckets.

A bucket is one storage, which torch's engine reduces from C++ in each backward pass. It may be
moved into shared memory. A tensor that a script reduces by itself stays where it is, as the script
may have noted its address.
"""

from __future__ import annotations

from types import FrameType
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd import graph

from paceline.comm.shm.moving import is_movable

LEAST = 256 << 10  # bytes from which moving pays
# Reductions of a storage at which it may move. Not the first: DDP then makes its buckets anew.
SIGHTS = range(2, 5)
# The function of torch that calls the engine: the Python frame beneath a reduction of DDP. Private;
# if torch renames it, this is None and nothing moves, which is slower but right.
ENGINE = getattr(getattr(graph, "_engine_run_backward", None), "__code__", None)


class RecurringMemory:
    """The storages that torch's engine has reduced, and how often."""

    def __init__(self) -> None:
        # Torch keeps one Python object for each storage, as long as the storage lives.
        self._seen: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()

    def may_move(self, x: Tensor, caller: FrameType | None) -> bool:
        """Whether the memory of `x` may move now.

        `caller`: the frame of Python that calls the reduction.
        """
        if caller is None or ENGINE is None or caller.f_code is not ENGINE or not is_movable(x):
            return False
        storage = x.untyped_storage()
        times = self._seen[storage] = self._seen.get(storage, 0) + 1
        return times in SIGHTS
