"""What is exchanged: how often, and what happens if an exchange is forgotten."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.parallel.tensor import cut_layers as layers
from paceline.parallel.tensor import exchanges
from paceline.parallel.tensor.exchanges import TensorAxis
from paceline.parallel.tensor.styles import column, row
from paceline.parallel.tensor.tensor_cut import tensor
from tests.harness.tensor_cuts import (
    PIECES,
    SHAPE,
    WHOLE,
    CountingGroup,
    batches,
    compare,
    context_of,
    cut_training,
    distance,
    features,
    gpt,
    loss_of,
    sgd,
    squares,
    train,
)
from tests.harness.thread_groups import ThreadGroup, spawn

torch.set_num_threads(1)
CUTS = pytest.mark.parametrize("cut", [WHOLE, PIECES], ids=["whole", "pieces"])


@pytest.mark.parametrize("mutant", ["forward", "backward", "bias", "norms", "scatter"])
def test_a_layer_that_forgets_its_sum_is_seen(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # which would see some before
    cut = replace(PIECES if mutant in ("norms", "scatter") else WHOLE, compare=False)
    if mutant == "forward":
        monkeypatch.setattr(TensorAxis, "sum_output", lambda self, x, name: x)
    elif mutant == "backward":
        monkeypatch.setattr(TensorAxis, "copy_input", lambda self, x, name: x)
    elif mutant == "bias":
        monkeypatch.setattr(
            layers.LayerCut,
            "finish_row_output",
            lambda self, y, bias: self.axis.sum_output(y + bias, self.name),
        )
    elif mutant == "norms":
        monkeypatch.setattr(
            TensorAxis, "share_parameters", lambda self, parameters, name: parameters
        )
    else:
        monkeypatch.setattr(
            exchanges._GatherInput,
            "backward",
            lambda ctx, grad: (
                ctx.record_wait[0].view_piece(grad, ctx.record_wait[1], ""),
                None,
                None,
                None,
            ),
        )
    alone, data = gpt(), batches(1)
    try:
        _, parameters = cut_training(2, copy.deepcopy(alone), cut, data, sgd)
    except AssertionError as found:
        assert "differs between ranks" in str(found)
        return
    train(alone, data, sgd)
    assert distance(parameters, alone) > 1e-5


@CUTS
def test_what_a_block_exchanges(cut: tensor) -> None:
    def exchanged(layers: int) -> list[Counter[str]]:
        model = gpt(shape=type(SHAPE)(d=16, layers=layers, heads=2, context=8, vocab=8))
        (x, y), *_ = batches(1, model.shape)

        def body(group: ThreadGroup) -> list[Counter[str]]:
            mine, counting = copy.deepcopy(model), CountingGroup(group)
            cut.apply(mine, context_of(counting))
            mine(x)  # the first output is compared
            counting.calls.clear()
            loss = loss_of(mine, x, y)
            forward = counting.calls.copy()
            loss.backward()
            return [forward, counting.calls - forward]

        return spawn(2, body)[0]

    per_block = [three - two for three, two in zip(exchanged(3), exchanged(2), strict=True)]
    if cut is WHOLE:
        assert per_block == [Counter(all_reduce=2)] * 2
    else:  # and in backward a small one for each norm and for each bias that is added to pieces
        gathers = Counter(all_gather=2, reduce_scatter=2)
        assert per_block == [gathers, gathers + Counter(all_reduce=4)]


def test_layers_that_share_their_input_sum_its_gradient_once() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.gate, self.up, self.down = (
                nn.Linear(4, 4),
                nn.Linear(4, 6),
                nn.Linear(4, 6),
                nn.Linear(6, 4),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
            return y

    def body(group: ThreadGroup) -> int:
        mine, counting = copy.deepcopy(model), CountingGroup(group)
        cut.apply(mine, context_of(counting))
        loss = mine(torch.ones(2, 4)).sum()
        counting.calls.clear()
        loss.backward()
        return counting.calls["all_reduce"]

    model, cut = Gated(), tensor({"gate": column(), "up": column(), "down": row()})
    assert spawn(2, body) == [1, 1]
    compare(model, cut, features(3, 4, 4), loss=squares)
