from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.balance import SpeedCurve, SpeedShares
from paceline.data.shares import (
    divide_equally,
    divide_proportionally,
    make_policy,
    probe_policy,
    share_bounds,
)
from paceline.errors import DataError


def test_equal_shares_differ_by_at_most_one_and_the_first_are_larger():
    assert divide_equally(8, 3) == (3, 3, 2)
    assert divide_equally(2, 4) == (1, 1, 0, 0)
    assert divide_equally(64, 4) == (16,) * 4


@pytest.mark.parametrize("ratios", [(1, 7), (0, 8), (3, 3, 2)])
def test_ratios_whose_sum_is_the_batch_are_the_shares(ratios):
    assert divide_proportionally(8, ratios) == ratios
    assert divide_proportionally(64, ratios) == tuple(8 * ratio for ratio in ratios)


def test_a_partial_batch_keeps_the_ratios_as_well_as_integers_can():
    assert divide_proportionally(43, (0, 8)) == (0, 43)
    assert divide_proportionally(43, (1, 7)) == (5, 38)
    assert divide_proportionally(43, (3, 3, 2)) == (16, 16, 11)


@given(st.integers(0, 5000), st.lists(st.floats(0, 1e6), min_size=1, max_size=9).filter(any))
def test_shares_sum_to_the_batch_and_are_off_by_less_than_one(batch, ratios):
    shares = divide_proportionally(batch, ratios)
    assert sum(shares) == batch
    for share, ratio in zip(shares, ratios, strict=True):
        assert abs(share - batch * ratio / sum(ratios)) < 1 + 1e-6
        assert ratio > 0 or share == 0


def test_spans_are_contiguous_in_rank_order():
    assert share_bounds((3, 0, 2)) == [(0, 3), (3, 3), (3, 5)]


def test_a_policy_is_checked_at_every_batch():
    good = make_policy(lambda batch: (1, batch - 1), 2)
    assert good(5) == (1, 4)
    for bad in (
        lambda batch: (batch, 1),
        lambda batch: (batch,),
        lambda batch: (batch + 1, -1),
        lambda batch: (batch / 2, batch / 2),
    ):
        with pytest.raises(DataError, match="2 integers, zero or more, that sum to 4"):
            make_policy(bad, 2)(4)


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ([1, 2, 3], "3 numbers for 2 workers"),
        ([0, 0], "at least one above zero"),
        ([-1, 2], "zero or more"),
    ],
)
def test_ratios_that_make_no_sense_raise(ratios, said):
    with pytest.raises(DataError, match=said):
        make_policy(ratios, 2)


def test_probes_tell_policies_apart():
    assert probe_policy(make_policy(None, 2), 64) == probe_policy(make_policy([1, 1], 2), 64)
    assert probe_policy(make_policy([1, 7], 2), 8) != probe_policy(make_policy([2, 6], 2), 8)
    mine, other = (
        SpeedShares([SpeedCurve(0.001, 0.001), SpeedCurve(0.05, 0.002)], per_sample=units)
        for units in (100.0, 1.0)
    )
    assert mine(32) != other(32) and probe_policy(mine, 32) != probe_policy(other, 32)
