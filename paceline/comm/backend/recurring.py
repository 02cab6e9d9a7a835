"""Finds the memory that torch reduces again and again, and that nobody else has the address of: the
buckets of DDP.

A bucket is one storage, which torch's engine reduces from C++, in each backward pass. Others may
have noted where a tensor of a script lies: what a script reduces by itself stays where it is.
"""

from __future__ import annotations

from types import FrameType
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd import graph

from paceline.comm.shm.moving import movable

LEAST = 256 << 10  # bytes from which moving pays
# at which of its reductions a storage may move: DDP makes its buckets anew after the first pass
SIGHTS = range(2, 5)
# what is under the engine on a thread's stack
ENGINE = getattr(getattr(graph, "_engine_run_backward", None), "__code__", None)


class RecurringMemory:
    """The storages that the engine has reduced, and how often."""

    def __init__(self) -> None:
        # torch keeps their objects as long as themselves
        self._seen: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()

    def may_move(self, x: Tensor, caller: FrameType | None) -> bool:
        """Whether the memory of `x` may move now.

        `caller`: the frame of Python that its reduction is called from.
        """
        if caller is None or ENGINE is None or caller.f_code is not ENGINE or not movable(x):
            return False
        storage = x.untyped_storage()
        times = self._seen[storage] = self._seen.get(storage, 0) + 1
        return times in SIGHTS
