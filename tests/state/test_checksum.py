"""Any bit that is flipped shows; strides, devices and the way a tensor lies in memory don't."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.state import checksum
from paceline.state.checksum import (
    ROW_WORDS,
    compute_checksums,
    multiply_elementwise,
    multiply_matrix_vector,
    view_bytes,
)

DTYPES = [
    *(
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.uint16,
        torch.int32,
        torch.uint32,
        torch.int64,
        torch.uint64,
    ),
    *(
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    ),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
SHAPES = st.lists(st.integers(0, 5), max_size=3) | st.sampled_from(
    [[ROW_WORDS - 1], [ROW_WORDS], [ROW_WORDS + 1], [3, ROW_WORDS], [2 * ROW_WORDS + 7]]
)


def made(dtype: torch.dtype, shape: list[int], seed: int = 0) -> Tensor:
    """Any bits (a bool has one)."""
    room = torch.empty(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype is torch.bool else 256
    return (
        torch.randint(0, top, (room.nbytes,), dtype=torch.uint8, generator=generator)
        .view(dtype)
        .reshape(shape)
    )


def number(x: Tensor) -> int:
    return compute_checksums([x])[0]


@settings(max_examples=300)
@given(st.sampled_from(DTYPES), SHAPES, st.data())
def test_any_flipped_bit_shows(dtype: torch.dtype, shape: list[int], data: st.DataObject) -> None:
    x = made(dtype, shape)
    if not x.numel():
        assert number(x) == number(x.clone())
        return
    other = x.clone()
    bit = data.draw(st.integers(0, x.nbytes - 1)) * 8 + data.draw(
        st.just(0) if dtype is torch.bool else st.integers(0, 7)
    )
    other.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    assert number(x) == number(x.clone()) != number(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
def test_each_bit_of_a_word_shows(dtype: torch.dtype) -> None:
    x = made(dtype, [ROW_WORDS + 3])
    words = x.view(torch.int32)
    seen = {number(x)}
    for place in (0, 1, len(words) - 1):
        for bit in range(32):
            words[place] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)
            seen.add(number(x))
            words[place] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)
    assert len(seen) == 1 + 3 * 32


@settings(max_examples=100)
@given(st.sampled_from(DTYPES), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_strides_don_t_matter(dtype: torch.dtype, a: int, b: int, c: int) -> None:
    x = made(dtype, [a, b, c])
    wide = (
        torch.zeros([a, b, 2 * c + 1], dtype=torch.uint8)
        .repeat_interleave(x.element_size(), 2)
        .view(dtype)
    )
    beside = wide[:, :, 1::2]
    beside.copy_(x)
    turned = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert compute_checksums([beside, turned, x.clone()]) == [number(x)] * 3


def test_where_it_lies_in_memory_doesn_t_matter() -> None:
    x = made(torch.float32, [50])
    room = torch.zeros(60)
    for start in range(5):
        room[start : start + 50] = x
        assert number(room[start : start + 50]) == number(x)
    z = made(torch.complex64, [9])
    assert number(z.conj()) == number(z.conj().resolve_conj()) != number(z)
    assert number(torch.zeros(3).expand(4, 3)) == number(torch.zeros(4, 3))


def test_what_has_changed_places_shows() -> None:
    """Also where words differ in their highest bit alone, which sums modulo 2**64 see least of."""
    x = made(torch.float64, [4 * ROW_WORDS])
    swapped = torch.cat([x[ROW_WORDS : 2 * ROW_WORDS], x[:ROW_WORDS], x[2 * ROW_WORDS :]])
    pairs = x.view(-1, 2).flip(1).reshape(-1)
    ones = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(ROW_WORDS)
    assert len({number(x), number(swapped), number(pairs), number(-x), number(-pairs)}) == 5
    assert number(ones) != number(-ones) and number(torch.zeros(8).double()) != number(
        -torch.zeros(8).double()
    )
    assert number(torch.zeros(8, dtype=torch.int64)) != number(torch.full((8,), -1))


def test_many_at_once_and_none() -> None:
    xs = [made(dtype, [7], seed) for seed, dtype in enumerate(DTYPES)] + [
        torch.tensor(3.0),
        torch.empty(0),
        torch.tensor(True),
    ]
    assert compute_checksums(xs) == [number(x) for x in xs] and len(
        set(compute_checksums(xs))
    ) == len(xs)
    assert compute_checksums([]) == []
    alike = list(made(torch.float32, [5000, 7]))  # too many to be mixed at once
    assert compute_checksums([*alike, torch.tensor(3.0)]) == [
        *map(number, alike),
        number(torch.tensor(3.0)),
    ]


def test_several_pieces_and_levels_are_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    x = made(torch.float32, [5 * ROW_WORDS + 11])
    found = number(x)
    monkeypatch.setattr(checksum, "ROWS_AT_ONCE", 1)
    assert number(x) == found
    monkeypatch.setattr(
        checksum, "ROW_WORDS", 16
    )  # then there are several levels, and other weights
    checksum._make_weights.cache_clear()
    y = x.clone()
    y.view(torch.int32)[77] ^= 1
    assert number(x) != number(y) and number(x) == number(x.clone())
    monkeypatch.undo()
    checksum._make_weights.cache_clear()
    assert number(x) == found


WORD = 1 << 64


def reference(words: list[int], level: int = 0) -> int:
    """The same in plain Python."""
    rows = []
    for start in range(0, len(words), ROW_WORDS):
        total = 0
        for place, x in enumerate(words[start : start + ROW_WORDS], level * ROW_WORDS + 1):
            z = place * 0x9E3779B97F4A7C15 % WORD
            z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % WORD
            z = (z ^ z >> 27) * 0x94D049BB133111EB % WORD
            total += ((z ^ z >> 31) | 1) * (x ^ x >> 32)
        rows.append(total % WORD)
    return reference(rows, level + 1) if len(rows) > 1 else rows[0]


def test_it_is_what_the_reference_gives() -> None:
    x = made(torch.uint8, [8 * (2 * ROW_WORDS + 100) + 3])
    data = bytes(x.tolist()) + bytes(5)
    words = [int.from_bytes(data[start : start + 8], "little") for start in range(0, len(data), 8)]
    assert number(x) % WORD == reference(words)
    assert number(torch.tensor(7)) == reference([7]) - (WORD if reference([7]) >= WORD // 2 else 0)


def test_gpus_multiply_alike() -> None:
    rows, weights = made(torch.int64, [3, 40]), made(torch.int64, [40], seed=1)
    assert torch.equal(multiply_elementwise(rows, weights), multiply_matrix_vector(rows, weights))


def test_bytes_are_not_copied_where_they_lie_in_order() -> None:
    x = torch.randn(4, 5)
    assert view_bytes(x).data_ptr() == x.data_ptr() and view_bytes(x.t()).data_ptr() != x.data_ptr()
    assert view_bytes(x.t()).view(torch.float32).tolist() == x.t().reshape(-1).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none"
)
def test_a_gpu_finds_the_same() -> None:
    xs = [made(dtype, [3, ROW_WORDS + 5], seed) for seed, dtype in enumerate(DTYPES)]
    assert compute_checksums([x.cuda() for x in xs]) == compute_checksums(xs)
    assert compute_checksums([xs[0].cuda(), xs[1], xs[2].cuda()]) == compute_checksums(xs[:3])
