"""A change in place shows in the version of a tensor."""

from __future__ import annotations

import torch

from paceline.state.tensor_version import version_of


def test_a_change_in_place_counts_and_a_copy_begins_anew() -> None:
    tensor = torch.zeros(3)
    before = version_of(tensor)
    assert version_of(tensor) == before
    tensor.add_(1)
    assert version_of(tensor) != before and version_of(tensor.clone()) == 0
    with torch.inference_mode():
        assert version_of(torch.zeros(3)) is None
