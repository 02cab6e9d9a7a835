"""Native codings write and read the messages of int8, int4, sign and topk, bit for bit."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.codec.coding import Coding, make_message
from paceline.codec.dense import int4, int8, sign
from paceline.codec.sparse import topk
from tests.harness.page_edges import move_to_page_edge

NUMBERS = {int8: 0, int4: 1, sign: 2}  # enum pl_coding
GUARD = 9  # elements before and behind each tensor, which nothing may write to
LENGTHS = (0, 1, 2, 7, 8, 9, 31, 33, 63, 64, 65, 129, 1000, 1023, 4097)
LONG = 131_072 + 65  # more than the codings of Python work on at a time
CODINGS = [
    *(int8(block=block) for block in (2, 34, 64, 1024)),
    *(int4(block=block) for block in (2, 34, 256)),
    *(sign(block=block) for block in (8, 24, 64, 504, 1024, 20_000)),
]


class Guarded:
    """A tensor between guards, at an address that is a multiple of its element size only."""

    def __init__(self, like: Tensor) -> None:
        self.room = torch.zeros(like.numel() + 2 * GUARD, dtype=like.dtype)
        self.room.view(torch.uint8).fill_(0x5A)
        self.tensor = self.room[GUARD : GUARD + like.numel()].copy_(like)

    def is_intact(self) -> bool:
        guards = torch.cat([self.room[:GUARD], self.room[GUARD + self.tensor.numel() :]])
        return bool((guards.view(torch.uint8) == 0x5A).all())


def address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def list_bits(x: Tensor) -> Tensor:
    """The bytes of a tensor; each nan is the same one, and each zero scale is positive."""
    if x.is_floating_point():
        x = torch.where(x.isnan(), torch.full_like(x, float("nan")), x)
    return x.contiguous().view(torch.uint8)


def encode(
    library: ctypes.CDLL, coding: Any, x: Tensor, noise: Tensor | None = None
) -> list[Tensor]:
    """Encode in C, and check that nothing else was written."""
    parts = [Guarded(part) for part in make_message(coding, x.numel())[1]]
    source, draws = Guarded(x), Guarded(noise) if noise is not None else None
    status = library.pl_encode(
        NUMBERS[type(coding)],
        address(source.tensor),
        ctypes.c_int64(x.numel()),
        ctypes.c_int64(coding.block),
        address(draws and draws.tensor),
        *(address(part.tensor) for part in parts),
    )
    assert status == 0
    assert source.is_intact()
    assert torch.equal(list_bits(source.tensor), list_bits(x))
    assert all(part.is_intact() for part in parts)
    return [part.tensor for part in parts]


def decode(
    library: ctypes.CDLL,
    coding: Any,
    message: list[Tensor],
    out: Tensor,
    factor: float | None = None,
) -> Tensor:
    """Decode a message in C to a copy of `out`, or add it times a factor."""
    target, parts = Guarded(out), [Guarded(part) for part in message]
    arguments = [
        NUMBERS[type(coding)],
        address(target.tensor),
        ctypes.c_int64(out.numel()),
        ctypes.c_int64(coding.block),
        *(address(part.tensor) for part in parts),
    ]
    if factor is None:
        assert library.pl_decode(*arguments) == 0
    else:
        assert library.pl_decode_add(*arguments, ctypes.c_float(factor)) == 0
    assert target.is_intact()
    return target.tensor


def check_messages(library: ctypes.CDLL, coding: Coding, x: Tensor, base: Tensor) -> None:
    """Check that message, decoded tensor, sum and difference are those of the Python coding."""
    _, expected = make_message(coding, x.numel())
    coding.encode(x, expected)
    # Torch gives a scale of zero one sign or the other, depending on the position of its block.
    scales = torch.where(expected[0] == 0, torch.zeros_like(expected[0]), expected[0])
    message = encode(library, coding, x)
    assert torch.equal(list_bits(message[0]), list_bits(scales))
    assert torch.equal(message[1], expected[1])
    decoded, total, difference = torch.empty_like(x), base.clone(), base.clone()
    coding.decode(message, decoded)
    coding.add(message, total)
    coding.add(message, difference, minus=True)
    assert torch.equal(list_bits(decode(library, coding, message, x)), list_bits(decoded))
    for factor, wanted in [(1.0, total), (-1.0, difference)]:
        result = decode(library, coding, message, base, factor)
        assert torch.equal(list_bits(result), list_bits(wanted))
    scaled = base + decoded * 0.3
    assert torch.equal(list_bits(decode(library, coding, message, base, 0.3)), list_bits(scaled))


def make_inputs(count: int) -> Iterator[Tensor]:
    """Usual, tiny, huge, mixed and special values."""
    x = torch.randn(count, generator=torch.Generator().manual_seed(count))
    yield x
    yield x * 1e-31
    yield x * 1e-40  # subnormal
    yield x * 1e38
    yield torch.exp(20 * x)
    yield torch.round(x * 4) / 8  # ties
    yield x.new_zeros(count)
    for value in (float("nan"), float("inf"), float("-inf"), -0.0):
        special = x.clone()
        special[:: max(1, count // 3)] = value
        yield special


@pytest.mark.parametrize("coding", CODINGS, ids=repr)
def test_messages_of_all_lengths(library: ctypes.CDLL, coding: Coding) -> None:
    for count in LENGTHS:
        base = torch.randn(count, generator=torch.Generator().manual_seed(1))
        for x in make_inputs(count):
            check_messages(library, coding, x, base)
    x = next(make_inputs(LONG))
    check_messages(library, coding, x, x.flip(0))


@settings(deadline=None, max_examples=60)
@given(
    coding=st.sampled_from(CODINGS),
    values=st.lists(st.floats(width=32), max_size=150),
)
def test_messages_of_any_floats(library: ctypes.CDLL, coding: Coding, values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    check_messages(library, coding, x, torch.ones_like(x))


@pytest.fixture
def single_thread() -> Iterator[None]:
    """Torch runs on one thread: several would divide a long block, and add in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("single_thread")
def test_mean_of_long_blocks(library: ctypes.CDLL) -> None:
    coding = sign(block=1 << 20)  # enough for the third level of torch's sums
    x = torch.randn((1 << 20) + 1000, generator=torch.Generator().manual_seed(3))
    check_messages(library, coding, x, torch.zeros_like(x))


@pytest.mark.parametrize("coding", CODINGS, ids=repr)
@pytest.mark.parametrize("edge", [0, 1])
def test_reads_nothing_outside(library: ctypes.CDLL, coding: Any, edge: int) -> None:
    for count in (1, 9, 63, 64, 65, 1001):
        x = move_to_page_edge(torch.randn(count), edge)
        noise = move_to_page_edge(torch.rand(count), edge)
        message = [move_to_page_edge(p, edge) for p in make_message(coding, count)[1]]
        shape = (ctypes.c_int64(count), ctypes.c_int64(coding.block))
        parts, number = [address(part) for part in message], NUMBERS[type(coding)]
        assert library.pl_encode(number, address(x), *shape, address(noise), *parts) == 0
        assert library.pl_encode(number, address(x), *shape, None, *parts) == 0
        assert library.pl_decode(number, address(x), *shape, *parts) == 0
        assert library.pl_decode_add(number, address(x), *shape, *parts, ctypes.c_float(1)) == 0
        indices = move_to_page_edge(torch.zeros(count, dtype=torch.int32), edge)
        arguments = (address(x), shape[0], ctypes.c_float(0), address(indices), shape[0])
        assert library.pl_find_large(*arguments) == count


@pytest.mark.parametrize("kind", [int8, int4])
@pytest.mark.parametrize("count", [1, 63, 1001, LONG])
def test_stochastic_rounding(library: ctypes.CDLL, kind: Any, count: int) -> None:
    coding = kind(block=64, rounding="stochastic")
    for x in make_inputs(count):
        _, expected = make_message(coding, count)
        coding.encode(x, expected, torch.Generator().manual_seed(5))
        noise = torch.rand(count, generator=torch.Generator().manual_seed(5))
        levels = encode(library, coding, x, noise)[1]
        assert torch.equal(levels, expected[1])


def test_refuses_unknown_codings_and_blocks(library: ctypes.CDLL) -> None:
    x = torch.ones(64)
    for coding, block in [(3, 64), (-1, 64), (0, 0), (0, -8), (1, 3), (2, 12)]:
        arguments = (coding, address(x), ctypes.c_int64(64), ctypes.c_int64(block))
        nothing = ctypes.c_void_p(None)
        assert library.pl_encode(*arguments, nothing, nothing, nothing) == -1
        assert library.pl_decode(*arguments, nothing, nothing) == -1
        assert library.pl_decode_add(*arguments, nothing, nothing, ctypes.c_float(1)) == -1
    assert torch.equal(x, torch.ones(64))


def find_large(library: ctypes.CDLL, x: Tensor, cutoff: float, capacity: int) -> tuple[int, Tensor]:
    source, indices = Guarded(x), Guarded(torch.full((capacity,), -7, dtype=torch.int32))
    library.pl_find_large.restype = ctypes.c_int64
    count = library.pl_find_large(
        address(source.tensor),
        ctypes.c_int64(x.numel()),
        ctypes.c_float(cutoff),
        address(indices.tensor),
        ctypes.c_int64(capacity),
    )
    assert indices.is_intact()
    return count, indices.tensor


@pytest.mark.parametrize("cutoff", [0.0, 1.0, 2.5, 1e9, float("inf"), float("nan")])
def test_large_elements_are_those_of_topk(library: ctypes.CDLL, cutoff: float) -> None:
    for count in LENGTHS:
        for x in make_inputs(count):
            wanted = torch.nonzero((x.abs() < cutoff).logical_not_()).view(-1)
            found, indices = find_large(library, x, cutoff, count)
            assert found == wanted.numel()
            assert torch.equal(indices[:found].long(), wanted)
            half = wanted.numel() // 2  # there is room for half of them
            found, indices = find_large(library, x, cutoff, half)
            assert found == wanted.numel()
            assert torch.equal(indices.long(), wanted[:half])


@pytest.mark.parametrize("minus", [False, True])
def test_sparse_add_is_that_of_topk(library: ctypes.CDLL, minus: bool) -> None:
    coding, count = topk(0.1), 5000
    x = torch.randn(count, generator=torch.Generator().manual_seed(1))
    _, message = make_message(coding, count)
    coding.encode(x, message)
    message[1][-9:] = 0  # an index may come more than once
    expected, out = torch.ones(count), Guarded(torch.ones(count))
    coding.add(message, expected, minus=minus)
    arguments = (address(message[1]), address(message[0]), ctypes.c_int64(message[0].numel()))
    factor = ctypes.c_float(-1.0 if minus else 1.0)
    status = library.pl_sparse_add(address(out.tensor), ctypes.c_int64(count), *arguments, factor)
    assert status == 0
    assert out.is_intact()
    assert torch.equal(out.tensor, expected)


@pytest.mark.parametrize("index", [-1, 10, 2**31 - 1, -(2**31)])
def test_sparse_add_refuses_other_indices(library: ctypes.CDLL, index: int) -> None:
    out, values = Guarded(torch.ones(10)), torch.ones(3)
    indices = torch.tensor([1, 2, index], dtype=torch.int32)
    status = library.pl_sparse_add(
        address(out.tensor),
        ctypes.c_int64(10),
        address(indices),
        address(values),
        ctypes.c_int64(3),
        ctypes.c_float(1),
    )
    assert status == -1
    assert out.is_intact()
    assert torch.equal(out.tensor, torch.ones(10))
