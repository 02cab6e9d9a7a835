"""Which memory is taken for that of DDP's buckets."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import Variable

from paceline.comm.backend.recurring import ENGINE, SIGHTS, RecurringMemory

ENGINES: Any = SimpleNamespace(f_code=ENGINE)  # a frame that the engine is called from


def test_torch_has_the_engine_where_it_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a script without a run: a run's own engine, which another test may have left, is
    called in between.
    """
    monkeypatch.setattr(Variable, "_execution_engine", torch._C._ImperativeEngine())
    assert ENGINE is not None
    frames: list[Any] = []
    x = torch.ones(3, requires_grad=True)
    (x * 2).register_hook(lambda grad: frames.append(sys._getframe(1)))
    between = x * 2
    between.register_hook(lambda grad: frames.append(sys._getframe(1)))
    between.sum().backward()
    assert [frame.f_code for frame in frames] == [ENGINE]


def test_a_storage_may_move_when_the_engine_reduces_it_again_and_not_for_ever() -> None:
    recurring = RecurringMemory()
    x, y = torch.ones(10), torch.ones(10)
    assert [recurring.may_move(x.view(2, 5), ENGINES) for _ in range(6)] == [
        turn in SIGHTS for turn in range(1, 7)
    ]
    assert not recurring.may_move(y, ENGINES) and recurring.may_move(y, ENGINES)


def test_what_a_script_reduces_stays_where_it_is() -> None:
    recurring, x = RecurringMemory(), torch.ones(10)
    assert not any(recurring.may_move(x, frame) for frame in [sys._getframe(), None] * 3)
    assert not any(recurring.may_move(part, ENGINES) for part in [x[1:], torch.nn.Parameter(x)] * 3)


def test_storages_that_are_gone_are_forgotten() -> None:
    recurring = RecurringMemory()
    for _ in range(5):
        x = torch.ones(10)
        assert not recurring.may_move(x, ENGINES) and recurring.may_move(x[:], ENGINES)
        del x
        gc.collect()
        assert len(recurring._seen) == 0
