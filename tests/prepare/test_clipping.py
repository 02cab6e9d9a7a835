"""run.clip takes the norm over all parts of a cut model: each part once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import UsageError
from paceline.session.run import Run
from tests.harness.cuts import columns, summed
from tests.harness.runs import alone, batches, workers


def clipped(
    *cuts: Any, max_norm: float = 0.05, norm_type: float = 2.0
) -> Callable[[Run], tuple[list[float], Tensor]]:
    """Train an epoch with clipped gradients; return the norms, and the layer that is whole
    everywhere.
    """

    def body(run: Run) -> tuple[list[float], Tensor]:
        torch_state = torch.Generator().manual_seed(5)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=torch_state, dtype=p.dtype))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        model, optimizer, loader = run.prepare(model, optimizer, batches(40, 8), cut=list(cuts))
        norms = []
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            found = run.clip(model, max_norm, norm_type)
            assert found is not None and found.dtype == torch.float64
            norms.append(float(found))
            optimizer.step()
        return norms, model[2].weight.detach().clone()

    return body


@pytest.mark.each_choice
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.5, math.inf])
@pytest.mark.parametrize("mesh", ["data=2, tensor=2", "shard=2, tensor=2"])
def test_norms_and_steps_are_those_of_one_worker(mesh: str, norm_type: float) -> None:
    norms, weight = alone(clipped(norm_type=norm_type))
    assert min(norms) > 0.05
    cuts = [columns(), *([summed()] if "shard" in mesh else [])]
    for theirs, found in workers(4, clipped(*cuts, norm_type=norm_type), mesh=mesh):
        assert theirs == pytest.approx(norms, rel=1e-9)
        assert float((found - weight).norm() / weight.norm()) < 1e-9


def test_gradients_below_the_norm_stay_as_they_are() -> None:
    norms, weight = alone(clipped(max_norm=1e6))
    for theirs, found in workers(2, clipped(columns(), max_norm=1e6), mesh="tensor"):
        assert theirs == pytest.approx(norms, rel=1e-9)
        assert float((found - weight).norm() / weight.norm()) < 1e-12


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_gradient_that_is_no_number_is_seen_on_all_workers(norm_type: float) -> None:
    def body(run: Run) -> float:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        run.prepare(model, cut=columns())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        if run.rank == 1:
            model[0].weight.grad[0, 0] = math.nan  # type: ignore[index,union-attr]
        found = run.clip(model, 1.0, norm_type)
        assert found is not None
        return float(found)

    assert all(math.isnan(norm) for norm in workers(2, body, mesh="tensor"))


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_gradient_without_elements(norm_type: float) -> None:
    def body(run: Run) -> float:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        model.register_parameter("none", nn.Parameter(torch.empty(0, dtype=torch.float64)))
        run.prepare(model, cut=columns())
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 2.0)
        found = run.clip(model, 1.0, norm_type)
        assert found is not None
        return float(found)

    elements = 6 * 8 + 8 + 8 * 2 + 2
    expected = 2.0 if norm_type == math.inf else math.sqrt(4.0 * elements)
    assert workers(2, body, mesh="tensor") == pytest.approx([expected] * 2, rel=1e-12)


def test_a_norm_that_is_none_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"norm_type=0\.0 is no norm; give a number above 0, or inf"
    ):
        workers(2, clipped(columns(), norm_type=0.0), mesh="tensor")
