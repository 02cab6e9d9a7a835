"""Native reductions have the bits of `reduce_parts`."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from paceline.comm.reduction_rules import DTYPES, check_operation, reduce_parts
from paceline.errors import UsageError
from tests.harness.page_edges import move_to_page_edge

OPS = ("sum", "mean", "product", "min", "max")  # in the order of enum pl_op
CANARY = 0x5A
SPECIAL = (0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1e-45, -3e-39, 6e-8, 65504.0, 1.5)


def list_addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def call_reduce(
    library: ctypes.CDLL,
    op: str,
    outs: Sequence[Tensor],
    parts: Sequence[Tensor],
) -> int:
    return library.pl_reduce(
        list_addresses(outs),
        len(outs),
        list_addresses(parts),
        len(parts),
        ctypes.c_int64(parts[0].numel()),
        DTYPES.index(parts[0].dtype),
        OPS.index(op),
    )


def make_tensor(kind: torch.dtype, count: int, *, start: int = 1, seed: int = 0) -> Tensor:
    """Make numbers `start` elements behind the begin of their memory, between two canaries."""
    generator = torch.Generator().manual_seed(seed)
    room = torch.empty((start + count + 8) * kind.itemsize, dtype=torch.uint8).fill_(CANARY)
    x = room[start * kind.itemsize : (start + count) * kind.itemsize].view(kind)
    if kind.is_floating_point or kind.is_complex:
        x.copy_(
            torch.randn(
                count,
                generator=generator,
                dtype=torch.complex128 if kind.is_complex else torch.float64,
            )
        )
    elif kind == torch.bool:
        x.copy_(torch.randint(0, 2, (count,), generator=generator))
    else:
        bounds = torch.iinfo(kind)
        x.copy_(torch.randint(bounds.min, bounds.max, (count,), generator=generator, dtype=kind))
    return x


def has_intact_canaries(x: Tensor) -> bool:
    """Whether the bytes before and behind a tensor of `make_tensor` are unchanged."""
    room = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
    start = x.storage_offset() * x.element_size()
    around = torch.cat([room[:start], room[start + x.numel() * x.element_size() :]])
    return bool((around == CANARY).all())


def list_bits(x: Tensor) -> Tensor:
    """List the bits of real lanes, with one nan for all."""
    lanes = torch.view_as_real(x).flatten() if x.is_complex() else x
    if lanes.is_floating_point():
        lanes = lanes.masked_fill(lanes.isnan(), float("nan"))
    return lanes.contiguous().view(torch.uint8)


def list_combinations() -> list[tuple[torch.dtype, str]]:
    combinations = []
    for kind, op in itertools.product(DTYPES, OPS):
        try:
            combinations.append((kind, check_operation(op, kind)))
        except UsageError:
            continue
    return combinations


COMBINATIONS = list_combinations()


def pad_to_vectors(op: str, parts: Sequence[Tensor]) -> Tensor:
    """Run `reduce_parts` so that torch computes every element in its vector loop, not in a tail."""
    count = parts[0].numel()
    padded = [torch.cat([part, part.new_zeros(-count % 256)]) for part in parts]
    return reduce_parts(op, padded)[:count]


@pytest.mark.parametrize(("kind", "op"), COMBINATIONS, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 8, 49])
def test_bits_of_reduce_parts(library: ctypes.CDLL, kind: torch.dtype, op: str, n: int) -> None:
    for count, start in [(0, 0), (1, 1), (7, 3), (129, 1), (1023, 5), (4099, 7)]:
        parts = [make_tensor(kind, count, start=start + k % 3, seed=k) for k in range(n)]
        outs = [make_tensor(kind, count, start=2), make_tensor(kind, count, start=3)]
        expected = list_bits(pad_to_vectors(op, parts))
        assert call_reduce(library, op, outs, parts) == 0
        for out in outs:
            assert torch.equal(list_bits(out), expected)
        assert all(has_intact_canaries(x) for x in [*outs, *parts])


@pytest.mark.parametrize(("kind", "op"), COMBINATIONS, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_outs_may_be_parts(library: ctypes.CDLL, kind: torch.dtype, op: str, n: int) -> None:
    for chosen in ([0], [n - 1], list(range(n)), list(reversed(range(n)))):
        parts = [make_tensor(kind, 3001, start=k, seed=k) for k in range(n)]
        expected = list_bits(pad_to_vectors(op, parts))
        assert call_reduce(library, op, [parts[k] for k in chosen], parts) == 0
        for k in chosen:
            assert torch.equal(list_bits(parts[k]), expected)
        assert all(has_intact_canaries(part) for part in parts)


@pytest.mark.parametrize(
    ("kind", "op"), [c for c in COMBINATIONS if c[0].is_floating_point or c[0].is_complex], ids=str
)
@pytest.mark.parametrize("n", [2, 3])
def test_special_values(library: ctypes.CDLL, kind: torch.dtype, op: str, n: int) -> None:
    if kind.is_complex:
        values = torch.tensor([complex(a, b) for a in SPECIAL for b in SPECIAL], dtype=kind)
    else:
        values = torch.tensor(SPECIAL, dtype=torch.float64).to(kind)
    rows = [grid.flatten() for grid in torch.meshgrid([values] * n, indexing="ij")]
    out = torch.empty_like(rows[0])
    assert call_reduce(library, op, [out], rows) == 0
    assert torch.equal(list_bits(out), list_bits(pad_to_vectors(op, rows)))


@pytest.mark.parametrize(("kind", "op"), COMBINATIONS, ids=str)
def test_reads_nothing_outside(library: ctypes.CDLL, kind: torch.dtype, op: str) -> None:
    for count in (1, 7, 17, 511, 1025):
        parts = [move_to_page_edge(make_tensor(kind, count, seed=k), k % 2) for k in range(4)]
        outs = [move_to_page_edge(parts[0], edge) for edge in (0, 1)]
        assert call_reduce(library, op, outs, parts) == 0
        assert torch.equal(list_bits(outs[0]), list_bits(outs[1]))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16], ids=str)
def test_every_half(library: ctypes.CDLL, kind: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(kind)
    partner = torch.randn(2**16, generator=torch.Generator().manual_seed(1)).to(kind)
    for parts, op in itertools.product(([every], [every, partner], [partner, every]), OPS):
        out = torch.empty_like(every)
        assert call_reduce(library, op, [out], parts) == 0
        assert torch.equal(list_bits(out), list_bits(reduce_parts(op, parts)))


def test_unsupported_combinations(library: ctypes.CDLL) -> None:
    for kind, op in itertools.product(DTYPES, OPS):
        x = make_tensor(kind, 5)
        before = list_bits(x)
        if (kind, op) not in COMBINATIONS:
            assert call_reduce(library, op, [x], [x, x]) == -1
        assert torch.equal(list_bits(x), before)
    address = ctypes.c_void_p(0)
    for dtype, operation in [(12, 0), (-1, 0), (0, 5), (0, -1)]:
        arguments = (address, 1, address, 1, ctypes.c_int64(0), dtype, operation)
        assert library.pl_reduce(*arguments) == -1
