"""What a turn that failed leaves behind: nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from paceline.data.rng import SampleOrder
from paceline.elastic.rollback import Rollback
from paceline.state.versioned import GeneratorStates, WorkerGenerator


def test_statistics_of_batchnorm_go_back_turn_after_turn() -> None:
    """Torch changes them without counting it as a change."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    backward: Any = SimpleNamespace(passes=1)
    undo = Rollback(dict, [model], GeneratorStates(torch.device("cpu")), backward)
    for _ in range(3):
        undo.begin_turn(1)
        before = [buffer.clone() for buffer in model.buffers()]
        model(torch.randn(8, 3))
        undo.restore_turn()
        assert all(map(torch.equal, model.buffers(), before))
        undo.begin_turn(1)
        model(torch.randn(8, 3))
        assert not torch.equal(next(model.buffers()), before[0])


def test_generators_go_back_and_so_does_the_order_of_samples() -> None:
    own, order = WorkerGenerator(1, 0, torch.device("cpu")), SampleOrder()
    backward: Any = SimpleNamespace(passes=1)
    undo = Rollback(
        dict, [], GeneratorStates(torch.device("cpu"), generator=own, order=order), backward
    )
    order.begin_epoch()

    def draw() -> list[float]:
        drawn = [float(torch.rand(())), float(torch.rand((), generator=own.generator))]
        with order.draw_from_order():
            return [*drawn, float(torch.rand(()))]

    draw()  # the order is apart from torch's own generator from here on
    undo.begin_turn(1)
    first = draw()
    undo.restore_turn()
    undo.begin_turn(1)
    assert draw() == first
    undo.begin_turn(1)
    assert not set(draw()) & set(first)
