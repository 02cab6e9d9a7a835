"""Memory of messages that have come. It goes back to its owner once no tensor lies in it."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

SMALLEST, SMALL = 1 << 12, 1 << 16  # bytes of the two sizes of small blocks
LINE = 64  # bytes: everything in a message begins at a multiple of it
# Bytes of a message up to which its tensors are copied out: a small tensor may be kept for long,
# and would keep the memory of the message.
COPIED = 1 << 14


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
    view = torch.frombuffer(buffer, dtype=dtype, count=nbytes // dtype.itemsize, offset=at)
    if len(shape) != 1:
        view = view.view(shape)
    return view.clone() if alone else view


def lay_out_tensors(start: int, lengths: Sequence[int]) -> tuple[list[int], int]:
    """Lay out the tensors of a message, each on a cache line, after `start` bytes of other things.

    Args:
        start: Bytes in front of the first tensor.
        lengths: Bytes of each tensor.

    Returns:
        The byte at which each tensor begins, and the bytes of everything.
    """
    places, at = [], start
    for length in lengths:
        at = -(-at // LINE) * LINE
        places.append(at)
        at += length
    return places, at
