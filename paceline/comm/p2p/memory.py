"""Memory that messages come into: used again once no tensor lies in it any more, as fresh memory
costs as much as receiving into it.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.comm.shm.memory import fresh

SMALLEST, SMALL = 1 << 12, 1 << 16  # bytes of the two kinds of small blocks
KEPT = 1 << 28  # bytes that a pool keeps unused


def capacity(nbytes: int) -> int:
    """Return the bytes of the blocks that messages of so many bytes take: few sizes, so that
    they are used again, and little lost.
    """
    if nbytes <= SMALL:
        return SMALLEST if nbytes <= SMALLEST else SMALL
    step = 1 << (nbytes - 1).bit_length() - 3
    return -(-nbytes // step) * step


def lend(address: int, nbytes: int, done: Callable[..., None], *arguments: Any) -> Any:
    """Return a buffer at this address, for `tensor`.

    Calls `done` with these arguments once it, and all tensors in it, are gone.
    """
    buffer = (ctypes.c_char * nbytes).from_address(address)
    finalizer = weakref.finalize(buffer, done, *arguments)
    finalizer.atexit = False
    return buffer


def tensor(
    buffer: Any,
    at: int,
    nbytes: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    *,
    alone: bool = False,
) -> Tensor:
    """Return the tensor whose bytes lie in a buffer from byte `at` on; it keeps the buffer,
    unless it is copied to memory `alone`.
    """
    if torch.is_inference_mode_enabled():  # it may outlive the evaluation during which it comes
        with torch.inference_mode(False):
            return tensor(buffer, at, nbytes, dtype, shape, alone=alone)
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    found = torch.frombuffer(buffer, dtype=dtype, count=nbytes // dtype.itemsize, offset=at).view(
        shape
    )
    return found.clone() if alone else found


class MemoryPool:
    """Blocks of this process's own memory. For any thread."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        # bytes, about: nothing is locked, as memory may come back in the middle of anything
        self._kept = 0

    def take(self, nbytes: int) -> Any:
        """Return a buffer of at least so many bytes."""
        size = capacity(nbytes)
        try:
            block = self._free[size].pop()
            self._kept -= size
        except IndexError:
            block = fresh((size,), torch.uint8)
        return lend(block.data_ptr(), size, self._give, block)

    def _give(self, block: Tensor) -> None:
        if self._kept + block.numel() <= KEPT:
            self._kept += block.numel()
            self._free[block.numel()].append(block)
