"""Tensors beside memory that nothing may touch: a read or write outside kills the process."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

_PROT_NONE = 0


def move_to_page_edge(x: Tensor, edge: int) -> Tensor:
    """Copy a tensor to the begin (edge 0) or to the end (1) of pages between two forbidden ones."""
    page, nbytes = mmap.PAGESIZE, x.numel() * x.element_size()
    width = max(1, -(-nbytes // page)) * page
    area = mmap.mmap(-1, width + 2 * page)
    # The tensor keeps the mapping alive.
    room = torch.frombuffer(area, dtype=torch.uint8)
    for forbidden in (room.data_ptr(), room.data_ptr() + page + width):
        address = ctypes.c_void_p(forbidden)
        assert ctypes.CDLL(None).mprotect(address, ctypes.c_size_t(page), _PROT_NONE) == 0
    start = page + (width - nbytes if edge else 0)
    return room[start : start + nbytes].view(x.dtype).copy_(x)
