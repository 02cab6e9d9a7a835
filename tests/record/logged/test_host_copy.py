"""A copy keeps what a tensor was when it was made."""

from __future__ import annotations

import torch

from paceline.record.logged.host_copy import HostCopy


def test_it_keeps_what_the_tensor_was() -> None:
    tensor = torch.ones(3)
    copy = HostCopy(tensor)
    tensor += 1
    assert copy.has_arrived()
    assert copy.read_tensor().tolist() == [1.0, 1.0, 1.0]


def test_what_is_shared_is_not_copied() -> None:
    tensor = torch.ones(3)
    assert HostCopy(tensor, shared=True).read_tensor() is tensor
