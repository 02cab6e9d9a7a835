"""Native reductions and scaled copies have the bits of `reduce_parts` and of torch."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from functools import reduce

import pytest
import torch
from torch import Tensor

from paceline.comm.reduction_rules import DTYPES, check_operation, reduce_parts
from paceline.errors import UsageError
from tests.harness.page_edges import move_to_page_edge

OPS = ("sum", "mean", "product", "min", "max")  # in the order of enum pl_op
BITWISE = {  # further ones of enum pl_op, which paceline's groups don't have
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
CANARY = 0x5A
SPECIAL = (0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1e-45, -3e-39, 6e-8, 65504.0, 1.5)


def list_addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def call_reduce(
    library: ctypes.CDLL,
    op: str,
    outs: Sequence[Tensor],
    parts: Sequence[Tensor],
    weights: Sequence[float] | None = None,
) -> int:
    factors = (ctypes.c_double * len(parts))(*weights) if weights is not None else None
    return library.pl_reduce(
        list_addresses(outs),
        len(outs),
        list_addresses(parts),
        len(parts),
        factors,
        ctypes.c_int64(parts[0].numel()),
        DTYPES.index(parts[0].dtype),
        [*OPS, *BITWISE].index(op),
    )


def call_scale(function: Callable[..., int], out: Tensor, x: Tensor, factor: float) -> int:
    return function(
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_int64(x.numel()),
        DTYPES.index(x.dtype),
        ctypes.c_double(factor),
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


@pytest.mark.parametrize("kind", [kind for kind in DTYPES if not kind.is_complex], ids=str)
@pytest.mark.parametrize("op", BITWISE)
def test_bitwise_operations(library: ctypes.CDLL, kind: torch.dtype, op: str) -> None:
    for count, n in [(0, 2), (1, 1), (67, 2), (4099, 3), (4099, 8)]:
        parts = [make_tensor(kind, count, start=1 + k, seed=k) for k in range(n)]
        out = make_tensor(kind, count, start=3)
        if kind.is_floating_point:
            assert call_reduce(library, op, [out], parts) == -1
            continue
        assert call_reduce(library, op, [out], parts) == 0
        assert torch.equal(out, reduce(BITWISE[op], parts))
        assert has_intact_canaries(out)


@pytest.mark.parametrize(("kind", "op"), COMBINATIONS, ids=str)
def test_reads_nothing_outside(library: ctypes.CDLL, kind: torch.dtype, op: str) -> None:
    for count in (1, 7, 17, 511, 1025):
        parts = [move_to_page_edge(make_tensor(kind, count, seed=k), k % 2) for k in range(4)]
        outs = [move_to_page_edge(parts[0], edge) for edge in (0, 1)]
        assert call_reduce(library, op, outs, parts) == 0
        assert torch.equal(list_bits(outs[0]), list_bits(outs[1]))
        if kind in FLOATS:
            assert call_scale(library.pl_scale_copy, outs[0], parts[0], 0.3) == 0
            assert call_scale(library.pl_scale_add, outs[1], parts[1], 0.3) == 0


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16], ids=str)
def test_every_half(library: ctypes.CDLL, kind: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(kind)
    partner = torch.randn(2**16, generator=torch.Generator().manual_seed(1)).to(kind)
    for parts, op in itertools.product(([every], [every, partner], [partner, every]), OPS):
        out = torch.empty_like(every)
        assert call_reduce(library, op, [out], parts) == 0
        assert torch.equal(list_bits(out), list_bits(reduce_parts(op, parts)))


@pytest.mark.parametrize("kind", FLOATS, ids=str)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_weights(library: ctypes.CDLL, kind: torch.dtype, op: str) -> None:
    weights = [0.5, 1.0, 1 / 3, 0.0, 2.25]
    for n in (1, 2, 3, 4, 5):
        parts = [make_tensor(kind, 1031, seed=k) for k in range(n)]
        total = sum(w * part.double() for w, part in zip(weights, parts, strict=False))
        out = make_tensor(kind, 1031)
        assert call_reduce(library, op, [out], parts, weights[:n]) == 0
        expected = total / n if op == "mean" else total
        bound = 8 * torch.finfo(kind).eps
        torch.testing.assert_close(out.double(), expected, rtol=bound, atol=bound)
        assert has_intact_canaries(out)


def test_weight_zero_leaves_a_part_out(library: ctypes.CDLL) -> None:
    x, bad, out = torch.ones(9), torch.full((9,), float("nan")), torch.empty(9)
    assert call_reduce(library, "sum", [out], [x, bad], [2.0, 0.0]) == 0
    assert torch.equal(out, torch.full((9,), 2.0))
    assert call_reduce(library, "mean", [out], [bad, bad], [0.0, 0.0]) == 0
    assert torch.equal(out, torch.zeros(9))


def test_unsupported_combinations(library: ctypes.CDLL) -> None:
    for kind, op in itertools.product(DTYPES, OPS):
        x = make_tensor(kind, 5)
        before = list_bits(x)
        if (kind, op) not in COMBINATIONS:
            assert call_reduce(library, op, [x], [x, x]) == -1
        if op not in ("sum", "mean") or kind not in FLOATS:
            assert call_reduce(library, op, [x], [x, x], [0.5, 0.5]) == -1
        assert torch.equal(list_bits(x), before)
        if kind not in FLOATS:
            assert call_scale(library.pl_scale_copy, x, x, 0.5) == -1
            assert call_scale(library.pl_scale_add, x, x, 0.5) == -1
    address = ctypes.c_void_p(0)
    assert library.pl_reduce(address, 1, address, 1, None, ctypes.c_int64(0), 12, 0) == -1
    assert library.pl_reduce(address, 1, address, 1, None, ctypes.c_int64(0), 0, 8) == -1


@pytest.mark.parametrize("kind", FLOATS, ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.5, 1 / 3, -2.7, 1e-3, 0.0])
def test_scale_copy_and_add(library: ctypes.CDLL, kind: torch.dtype, factor: float) -> None:
    # A multiple of torch's vectors: in its tail, torch rounds products of halves on their own.
    for count in (1, 7, 256, 4096, 4099):
        room = count + -count % 256
        x, base = make_tensor(kind, room, seed=1), make_tensor(kind, room, seed=2)
        out = make_tensor(kind, count, start=3)
        assert call_scale(library.pl_scale_copy, out, x[:count], factor) == 0
        assert torch.equal(list_bits(out + 0.0), list_bits(x[:count] * factor + 0.0))
        out.copy_(base[:count])
        assert call_scale(library.pl_scale_add, out, x[:count], factor) == 0
        is_split = kind.itemsize >= 4 and not library.fuses
        expected = base + x * factor if is_split else base.add(x, alpha=factor)
        assert torch.equal(list_bits(out), list_bits(expected[:count]))
        assert has_intact_canaries(out)


def test_scale_zero_ignores_nan(library: ctypes.CDLL) -> None:
    for kind in FLOATS:
        bad, out = torch.full((9,), float("nan"), dtype=kind), torch.ones(9, dtype=kind)
        assert call_scale(library.pl_scale_add, out, bad, 0.0) == 0
        assert torch.equal(out, torch.ones(9, dtype=kind))
        assert call_scale(library.pl_scale_copy, out, bad, 0.0) == 0
        assert torch.equal(out, torch.zeros(9, dtype=kind))


def test_copy(library: ctypes.CDLL) -> None:
    x, out = make_tensor(torch.uint8, 100_003, start=3), make_tensor(torch.uint8, 100_003, seed=1)
    for source in (x, out):
        library.pl_copy(
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_void_p(source.data_ptr()),
            ctypes.c_int64(x.numel()),
        )
        assert torch.equal(out, x)
        assert has_intact_canaries(out)
