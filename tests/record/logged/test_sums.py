"""Weighted sums of numbers on the host and on a device, and what is no number."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import UsageError
from paceline.record.logged.sums import WeightedSum, send_to_host, to_number


def on_device(value: float) -> torch.Tensor:
    """A number as it is kept on a device; on the CPU here, which sums don't ask about."""
    return torch.tensor(value, dtype=torch.float64)


def test_numbers_of_the_host_and_of_a_device_are_one_sum() -> None:
    sums = WeightedSum()
    sums.add_number(2.0, 3.0)
    sums.add_number(on_device(4.0), 1.0)
    sums.add_number(on_device(5.0), 2.0)
    assert sums.pack_sum() == [20.0, 6.0]
    for copy in send_to_host([sums, WeightedSum()]):
        assert copy.has_arrived()
        copy.read_sums()
    assert (sums.total, sums.weight, sums.device) == (20.0, 6.0, None)


def test_sums_take_in_each_other() -> None:
    one, other = WeightedSum(1.0, 1.0), WeightedSum(2.0, 3.0, on_device(4.0))
    one.add_sum(other)
    one.add_sum(other)
    assert one.pack_sum() == [13.0, 7.0]


def test_nothing_is_copied_of_sums_on_the_host() -> None:
    assert send_to_host([WeightedSum(1.0, 1.0)]) == []


def test_what_is_no_number_says_what_could_be_meant() -> None:
    assert to_number("x", torch.tensor([3])) == 3.0
    with pytest.raises(
        UsageError,
        match=(
            r"run\.log\(x=\.\.\.\) got a torch\.float32 tensor of shape "
            r"\(2,\).*pl\.histogram\(tensor\)"
        ),
    ):
        to_number("x", torch.ones(2))
