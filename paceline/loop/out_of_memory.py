"""Tells errors that say that memory ran out from others."""

from __future__ import annotations

import torch


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that memory has run out, on a GPU or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # torch's CPU allocator raises a plain RuntimeError, which only its text tells from others
    return isinstance(error, RuntimeError) and (
        "DefaultCPUAllocator" in str(error) or "can't allocate memory" in str(error)
    )
