"""Gradients that add up passes of different weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from paceline.sync.mixed_weights import MixedWeights


class Known(NamedTuple):
    index: int
    name: str


def test_a_parameter_whose_gradient_adds_up_other_weights_is_named() -> None:
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    one.grad = other.grad = torch.ones(2)
    mixed = MixedWeights({id(one): Known(0, "one"), id(other): Known(1, "other")})
    assert not mixed.record_part(0.5)  # the first pass has none before it
    assert not mixed.record_part(0.5)
    assert mixed.record_part(0.25)
    mixed.record_prior(1, torch.ones(2), uneven=True)
    mixed.record_prior(0, torch.ones(2), uneven=False)
    assert mixed.find_mixed([one]) is None
    assert mixed.find_mixed([one, other]) == "other"
    other.grad = torch.zeros(2)
    assert mixed.find_mixed([one, other]) is None  # it was cleared
    other.grad = torch.ones(2)
    mixed.record_prior(1, torch.zeros(2), uneven=True)
    assert mixed.find_mixed([one, other]) is None  # nothing was there before the pass
    mixed.record_prior(1, torch.ones(2), uneven=True)
    mixed.clear_numbers()
    assert mixed.find_mixed([one, other]) is None
