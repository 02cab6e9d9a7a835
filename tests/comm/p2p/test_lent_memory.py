from __future__ import annotations

import gc

import pytest
import torch

from paceline.comm.p2p.lent_memory import (
    SMALL,
    SMALLEST,
    block_size,
    lay_out_tensors,
    lend_buffer,
    view_tensor,
)


@pytest.mark.parametrize(
    "nbytes",
    [
        1,
        SMALLEST,
        SMALLEST + 1,
        SMALL,
        SMALL + 1,
        (1 << 20) - 1,
        1 << 20,
        (1 << 20) + 1,
        123_456_789,
    ],
)
def test_blocks_have_few_sizes_and_waste_little(nbytes: int) -> None:
    assert nbytes <= block_size(nbytes) <= max(SMALL, 1.26 * nbytes)
    assert (
        block_size(block_size(nbytes)) == block_size(nbytes) and block_size(nbytes) % SMALLEST == 0
    )


def test_a_buffer_is_given_back_when_its_last_tensor_goes() -> None:
    given, values = [], torch.arange(12, dtype=torch.int16)
    buffer = lend_buffer(values.data_ptr(), 24, given.append, values)
    one = view_tensor(buffer, 4, 8, torch.int16, (2, 2))
    other = view_tensor(buffer, 0, 24, torch.bfloat16, (12,))
    copied = view_tensor(buffer, 2, 2, torch.int16, (), alone=True)
    empty = view_tensor(buffer, 0, 0, torch.float32, (0, 3))
    del buffer, other
    row = one[1]
    del one
    gc.collect()
    assert not given and row.tolist() == [4, 5]
    del row
    assert given == [values] and copied.item() == 1 and empty.shape == (0, 3)


def test_tensors_begin_on_cache_lines() -> None:
    assert lay_out_tensors(5, []) == ([], 5)
    assert lay_out_tensors(64, [1, 0, 130, 3]) == ([64, 128, 128, 320], 323)
