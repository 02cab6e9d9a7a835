"""Memory for incoming messages, used again once no tensor lies in it any more.

Fresh memory costs as much as receiving into it: the kernel clears each page at its first use.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.comm.shm.shared_segment import empty_on_cpu

SMALLEST, SMALL = 1 << 12, 1 << 16  # bytes of the two sizes of small blocks
KEPT = 1 << 28  # bytes of free memory that a pool keeps


def block_size(nbytes: int) -> int:
    """Round `nbytes` up to the size of a block.

    There are few sizes, so that blocks are used again: four between a power of two and the next,
    so at most a quarter is unused.
    """
    if nbytes <= SMALL:
        return SMALLEST if nbytes <= SMALLEST else SMALL
    step = 1 << (nbytes - 1).bit_length() - 3
    return -(-nbytes // step) * step


def lend_buffer(address: int, nbytes: int, done: Callable[..., None], *arguments: Any) -> Any:
    """Make a buffer of the memory at `address`, for `view_tensor`.

    `done(*arguments)` is called once the buffer, and all tensors in it, are gone.
    """
    buffer = (ctypes.c_char * nbytes).from_address(address)
    # Tensors keep the buffer alive: torch.frombuffer holds a reference to it. At exit nothing is
    # given back, as the memory may be unmapped by then.
    finalizer = weakref.finalize(buffer, done, *arguments)
    finalizer.atexit = False
    return buffer


def view_tensor(
    buffer: Any,
    at: int,
    nbytes: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    *,
    alone: bool = False,
) -> Tensor:
    """View the bytes of a buffer from `at` on as a tensor, which keeps the buffer.

    `alone`: copy it to memory of its own instead.
    """
    # It may outlive the evaluation in which it arrives.
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return view_tensor(buffer, at, nbytes, dtype, shape, alone=alone)
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    view = torch.frombuffer(buffer, dtype=dtype, count=nbytes // dtype.itemsize, offset=at).view(
        shape
    )
    return view.clone() if alone else view


class MemoryPool:
    """Blocks of this process's own memory. For any thread.

    There is no lock: a finalizer may give memory back at any moment, even while the same thread
    holds the lock. List operations are atomic; `_free_bytes` is only about right.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._free_bytes = 0  # bytes of free memory, about

    def take_buffer(self, nbytes: int) -> Any:
        """Return a buffer of at least `nbytes` bytes."""
        size = block_size(nbytes)
        try:
            block = self._free[size].pop()
            self._free_bytes -= size
        except IndexError:
            block = empty_on_cpu((size,), torch.uint8)
        return lend_buffer(block.data_ptr(), size, self._give_back, block)

    def _give_back(self, block: Tensor) -> None:
        if self._free_bytes + block.numel() <= KEPT:
            self._free_bytes += block.numel()
            self._free[block.numel()].append(block)
