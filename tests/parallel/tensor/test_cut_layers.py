"""Layers of each kind, cut between workers, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.parallel.tensor.styles import column, row, summed, vocab
from paceline.parallel.tensor.tensor_cut import tensor
from tests.harness.tensor_cuts import Unasked, compare, context_of, features, squares

torch.set_num_threads(1)


class Conv1D(nn.Module):
    """A linear layer with its weight transposed, as transformers has it."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight, self.bias = (
            nn.Parameter(torch.randn(inputs, outputs) / 4),
            nn.Parameter(torch.randn(outputs)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(
            *x.shape[:-1], self.nf
        )


@pytest.mark.parametrize(
    ("layers", "cut"),
    [
        ([nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)], {"0": column(), "2": row()}),
        (
            [nn.Linear(5, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False)],
            {"0": column(), "2": row()},
        ),
        (
            [nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)],
            {"0": column(parts=2, gather=True), "2": row(split=True)},
        ),
        ([Conv1D(6, 5), nn.Tanh(), Conv1D(4, 6)], {"0": column(), "2": row()}),
        (
            [nn.Linear(5, 6), nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 4)],
            {"1": column(gather=True), "4": vocab()},
        ),
        (
            [nn.Linear(5, 4), nn.Sequential(nn.LayerNorm(2), nn.Tanh()), nn.Linear(4, 3)],
            {"0": column(), "1": summed(), "2": row()},
        ),
    ],
    ids=["mlp", "no-bias", "gather-split", "conv1d", "head", "summed"],
)
def test_small_models_equal_one_process(layers: list[nn.Module], cut: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    outputs = model(torch.zeros(1, 5)).shape[1] if cut.get("1") != summed() else 3
    if cut.get("1") == summed():  # norms of single heads see two features each
        model = nn.Sequential(
            layers[0], nn.Unflatten(1, (-1, 2)), layers[1], nn.Flatten(1), layers[2]
        )
        cut = {"0": column(), "2": summed(), "4": row()}
    compare(model, tensor(cut), features(5, 5, outputs), loss=squares)


class LoRA(nn.Module):
    """A frozen layer with a trained one of low rank beside it, as peft wraps it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = (
            nn.Linear(base.in_features, 2, bias=False),
            nn.Linear(2, base.out_features, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.b(self.a(x))
        return y


def test_frozen_layers_with_adapters_beside_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), LoRA(nn.Linear(4, 6)), nn.Tanh(), LoRA(nn.Linear(6, 3)))
    model[0].requires_grad_(False)
    cut = tensor({"1.base": column(), "1.b": column(), "3.base": row(), "3.a": row()})
    compare(model, cut, features(5, 5, 3), loss=squares)
    with pytest.raises(
        UsageError,
        match=(
            r"1 is a LoRA, which column\(\) can't cut; .* name what is inside: "
            r"1.base \(Linear\), 1.a"
        ),
    ):
        tensor({"1": column()}).apply(model, context_of(Unasked()))  # type: ignore[arg-type]
