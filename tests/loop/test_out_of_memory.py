"""Errors that say that memory has run out are known, and others are not taken for them."""

from __future__ import annotations

import pytest
import torch

from paceline.loop.out_of_memory import is_out_of_memory


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: "
                "you tried to allocate"
            ),
            True,
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("can't allocate memory"), False),
        (None, False),
    ],
)
def test_errors_that_say_that_memory_has_run_out(error, is_it):
    assert is_out_of_memory(error) is is_it


def test_the_allocator_of_the_cpu_raises_what_is_known():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    assert is_out_of_memory(caught.value)
