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
    assert not mixed.changes(0.5)  # the first pass has none before it
    assert not mixed.changes(0.5)
    assert mixed.changes(0.25)
    mixed.note(1, torch.ones(2), uneven=True)
    mixed.note(0, torch.ones(2), uneven=False)
    assert mixed.find([one]) is None
    assert mixed.find([one, other]) == "other"
    other.grad = torch.zeros(2)
    assert mixed.find([one, other]) is None  # it was cleared
    other.grad = torch.ones(2)
    mixed.note(1, torch.zeros(2), uneven=True)
    assert mixed.find([one, other]) is None  # nothing was there before the pass
    mixed.note(1, torch.ones(2), uneven=True)
    mixed.clear()
    assert mixed.find([one, other]) is None
