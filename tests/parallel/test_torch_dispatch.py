from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from paceline.parallel.torch_dispatch import is_in_dispatch_mode, written_arguments


def test_an_operator_tells_what_it_writes_to() -> None:
    assert list(written_arguments(torch.ops.aten.add_.Tensor)) == [(0, "self")]
    assert list(written_arguments(torch.ops.aten.add.out)) == [(3, "out")]
    assert not list(written_arguments(torch.ops.aten.add.Tensor))


def test_a_dispatch_mode_is_seen() -> None:
    assert not is_in_dispatch_mode()
    with FlopCounterMode(display=False):
        assert is_in_dispatch_mode()
    assert not is_in_dispatch_mode()
