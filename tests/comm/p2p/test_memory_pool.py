from __future__ import annotations

import ctypes
import gc

import pytest
import torch

from paceline.comm.p2p import memory_pool
from paceline.comm.p2p.memory_pool import (
    SMALL,
    SMALLEST,
    MemoryPool,
    block_size,
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


def test_memory_is_used_again_and_not_hoarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_pool, "KEPT", 2 * SMALL)
    pool = MemoryPool()
    held = [pool.take_buffer(SMALL) for _ in range(4)]
    places = {ctypes.addressof(buffer) for buffer in held}
    assert len(places) == 4
    del held[1:]
    assert sum(len(blocks) for blocks in pool._free.values()) == 2
    again = [pool.take_buffer(SMALL - 9) for _ in range(2)]
    assert {ctypes.addressof(buffer) for buffer in again} < places - {ctypes.addressof(held[0])}
    assert len(again[0]) == SMALL and len(pool.take_buffer(0)) == SMALLEST
