"""Histograms equal those of numpy, count what isn't finite apart, and refuse what has none."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.record.logged.histogram import HistogramCounts, histogram


def counted(values: Tensor, bins: int = 64) -> HistogramCounts:
    return HistogramCounts.from_vector(histogram(values, bins).to_compact_tensor())


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8]
)
def test_it_equals_that_of_numpy(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    values = (torch.randn(5, 400, generator=generator).abs() * 20).to(dtype)
    found = counted(values, 16)
    exact = values.to(torch.float64).numpy().ravel()
    wanted, edges = np.histogram(
        exact.astype(np.float64 if dtype == torch.float64 else np.float32), bins=16
    )
    assert found.bin_edges == pytest.approx(edges.tolist())
    # on an edge
    assert (
        found.counts == tuple(wanted)
        if dtype == torch.float64
        else np.abs(np.subtract(found.counts, wanted)).sum() <= 4
    )
    assert (found.count, found.other, sum(found.counts)) == (2000, 0, 2000)
    assert (found.low, found.high) == (exact.min(), exact.max())
    assert (found.total, found.squares) == pytest.approx((exact.sum(), (exact**2).sum()))


def test_what_is_not_finite_is_counted_apart() -> None:
    found = counted(torch.tensor([math.nan, 1.0, math.inf, 2.0, -math.inf]), 2)
    assert found == HistogramCounts(1.0, 2.0, 2, 3, 3.0, 5.0, (1, 1))
    assert counted(torch.tensor([math.nan, math.inf]), 2) == HistogramCounts(
        0.0, 0.0, 0, 2, 0.0, 0.0, (0, 0)
    )


def test_equal_numbers_have_an_interval() -> None:
    found = counted(torch.full((3,), 7.0), 4)
    assert (found.low, found.high, found.counts) == (7.0, 7.0, (3, 0, 0, 0))
    assert found.bin_edges == sorted(set(found.bin_edges))


def test_it_is_counted_when_it_is_logged() -> None:
    values = torch.zeros(2)
    asked = histogram(values, 2)
    values += torch.tensor([1.0, 3.0])
    assert HistogramCounts.from_vector(asked.to_compact_tensor()).high == 3.0


def test_fields_are_those_of_a_line() -> None:
    fields = {
        "kind": "histogram",
        "low": 0.0,
        "high": 1.0,
        "count": 2,
        "other": 0,
        "sum": 1.0,
        "squares": 1.0,
        "counts": [1, 1],
    }
    assert counted(torch.tensor([0, 1]), 2).to_fields() == fields


@pytest.mark.parametrize("given", [torch.empty(0), torch.ones(2) * 1j, [1.0], 3])
def test_what_has_no_histogram_is_refused(given: object) -> None:
    with pytest.raises(UsageError, match=r"pl\.histogram got .*give a real tensor"):
        histogram(given)  # type: ignore[arg-type]


@pytest.mark.parametrize("bins", [0, 513])
def test_intervals_have_bounds(bins: int) -> None:
    with pytest.raises(UsageError, match="give 1 to 512"):
        histogram(torch.ones(2), bins)
