"""`run.step` is what forward and backward are, in any layout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paceline.errors import UsageError
from paceline.session.run import Run
from tests.harness.models import net, sgd
from tests.harness.runs import batches, distance, parameters, workers


def trained(run: Run, *, by_hand: bool) -> tuple[torch.Tensor, list[float]]:
    model = net()
    optimizer = sgd(model)
    model, optimizer, loader = run.prepare(model, optimizer, batches(37))
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        if by_hand:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            losses.append(float(loss.detach()))
        else:
            losses.append(float(run.step(model, x, y, loss=F.mse_loss)))
        optimizer.step()
    return parameters(model), losses


def test_a_step_without_stages_is_forward_and_backward() -> None:
    wanted = workers(2, lambda run: trained(run, by_hand=True))
    for (one, losses), (two, others) in zip(workers(2, lambda run: trained(run, by_hand=False)), wanted, strict=True):
        assert distance(one, two) == 0.0 and losses == others


def test_what_is_no_step_is_refused() -> None:
    def body(run: Run) -> None:
        model = net()
        run.prepare(model, sgd(model))
        x = torch.ones(2, 6, dtype=torch.float64)
        with pytest.raises(UsageError, match=r"run.step needs a loss"):
            run.step(model, x, x, loss=None)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"run.step got no batch"):
            run.step(model, loss=F.mse_loss)
        with pytest.raises(UsageError, match=r"the loss is a Tensor that isn't one number"):
            run.step(model, x, x[:, :2], loss=lambda out, y: out)

    workers(1, body)


def test_gradients_that_are_off_stay_off() -> None:
    def body(run: Run) -> bool:
        model = net()
        run.prepare(model, sgd(model))
        with torch.no_grad():
            run.step(model, torch.ones(2, 6, dtype=torch.float64), torch.ones(2, 2, dtype=torch.float64), loss=F.mse_loss)
        return all(parameter.grad is None for parameter in model.parameters())

    assert workers(2, body) == [True, True]
