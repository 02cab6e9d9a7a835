"""`run.step` is what forward and backward are, in any layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl
from paceline.errors import UsageError
from paceline.session.run import Run
from tests.harness.models import net, sgd
from tests.harness.runs import batches, cut, distance, parameters, workers


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
    for (one, losses), (two, others) in zip(
        workers(2, lambda run: trained(run, by_hand=False)), wanted, strict=True
    ):
        assert distance(one, two) == 0.0 and losses == others


def test_what_is_no_step_is_refused() -> None:
    def body(run: Run) -> None:
        model = net()
        run.prepare(model, sgd(model))
        x = torch.ones(2, 6, dtype=torch.float64)
        with pytest.raises(UsageError, match=r"run.step needs a loss"):
            run.step(model, x, x, loss=None)  # type: ignore[arg-type]
        with pytest.raises(
            UsageError,
            match=r"run.step: loss=MSELoss is the class itself; make one of it: loss=MSELoss\(\)",
        ):
            run.step(model, torch.ones(1, 2), torch.ones(1, 2), loss=nn.MSELoss)
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
            run.step(
                model,
                torch.ones(2, 6, dtype=torch.float64),
                torch.ones(2, 2, dtype=torch.float64),
                loss=F.mse_loss,
            )
        return all(parameter.grad is None for parameter in model.parameters())

    assert workers(2, body) == [True, True]


def test_a_loss_that_was_gone_back_from_says_so() -> None:
    def body(run: Run) -> None:
        model, x = net(), torch.ones(2, 6, dtype=torch.float64)
        run.prepare(model, sgd(model))
        loss = run.step(model, x, x[:, :2], loss=F.mse_loss)
        with pytest.raises(
            UsageError,
            match=(
                r"run.step has already run the backward pass of this loss: "
                r"leave out loss.backward\(\)"
            ),
        ):
            loss.backward()  # type: ignore[no-untyped-call]

    workers(2, body)


def test_two_scalers_of_one_scale_scale_a_loss_once() -> None:
    def body(run: Run) -> float:
        model, x = net(), torch.ones(2, 6, dtype=torch.float64)
        optimizer = sgd(model)
        first, second = (torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2))
        run.prepare(model, optimizer, first, second)
        run.step(model, x, x[:, :2], loss=F.mse_loss)
        first.unscale_(optimizer)
        return float(sum(p.grad.abs().sum() for p in model.parameters() if p.grad is not None))

    def plain(run: Run) -> float:
        model, x = net(), torch.ones(2, 6, dtype=torch.float64)
        run.prepare(model, sgd(model))
        run.step(model, x, x[:, :2], loss=F.mse_loss)
        return float(sum(p.grad.abs().sum() for p in model.parameters() if p.grad is not None))

    assert workers(1, body) == pytest.approx(workers(1, plain), rel=1e-12)


@pytest.mark.parametrize("own", [True, False])
def test_a_pipeline_whose_loss_uses_parameters_itself_is_refused(own: bool) -> None:
    def body(run: Run) -> None:
        model, head, x = net(), nn.Linear(2, 2).double(), torch.ones(4, 6, dtype=torch.float64)
        run.prepare(
            model,
            torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1),
            cut=pl.pipeline("0, 1, 2", micro_batches=2),
        )
        # whatever it makes of the output
        run.step(model, x, x[:, :2], loss=lambda out, y: out[0, 0])
        used = list((model if own else head).parameters())
        run.step(
            model,
            x,
            x[:, :2],
            loss=lambda out, y: (
                F.mse_loss(out, y) + sum(parameter.square().sum() for parameter in used)
            ),
        )

    with pytest.raises(
        UsageError, match=r"the loss uses the parameter \S+ itself, .*where the last stage is"
    ):
        workers(2, body, mesh="stage=2")


def in_parts(run: Run, micro_batches: int, **options: Any) -> tuple[torch.Tensor, list[float], int]:
    model = net()
    model, optimizer, loader = run.prepare(model, sgd(model), batches(37), **options)
    losses, sent = [], 0
    weigh = options.get("weigh")
    for x, y in loader:
        optimizer.zero_grad()
        loss = run.step(
            model,
            x,
            y,
            loss=weighed if weigh else F.mse_loss,
            weigh=weigh,
            micro_batches=micro_batches,
        )
        sent += run._backward.passes
        optimizer.step()
        losses.append(float(loss))
    return parameters(model), losses, sent


def weighed(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    weights = y.abs()
    return (weights * (out - y).square()).sum() / weights.sum()


@pytest.mark.parametrize(
    ("options", "strategy"),
    [
        ({}, None),
        ({"shares": cut(1, 7)}, None),
        ({"weigh": lambda batch: float(batch[1].abs().sum())}, None),
        ({}, pl.ParameterServer(servers=1)),
    ],
    ids=["equal", "uneven", "weighed", "servers"],
)
def test_micro_batches_change_nothing_but_the_memory(
    options: dict[str, Any], strategy: Any
) -> None:
    (wanted, losses, _), *_ = workers(
        1,
        lambda run: in_parts(
            run, 1, **{name: each for name, each in options.items() if name == "weigh"}
        ),
    )
    for size in (1, 2):
        given = (
            options
            if size > 1
            else {name: each for name, each in options.items() if name == "weigh"}
        )
        for found, mine, sent in workers(
            size,
            lambda run, given=given: in_parts(run, 3, **given),
            strategy=strategy if size > 1 else None,
        ):
            assert distance(found, wanted) < 1e-12
            assert size > 1 or mine == pytest.approx(losses, rel=1e-12)
            assert size == 1 or sent == len(losses), "one exchange a step"


class Scaled(nn.Module):
    """A model with an option, by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) * scale
        return out


def test_weigh_counts_a_tuple_of_all_arguments_with_the_target_last() -> None:
    shapes = []

    def weigh(arguments: tuple[torch.Tensor, ...]) -> float:
        shapes.append([tuple(each.shape) for each in arguments])
        return float(len(arguments[0]))

    def body(run: Run) -> None:
        model = Scaled()
        model, optimizer, loader = run.prepare(model, sgd(model), batches(8, 8))
        for x, y in loader:
            scale = torch.ones(len(x), 1, dtype=x.dtype)
            run.step(model, x, y, loss=F.mse_loss, scale=scale, weigh=weigh, micro_batches=2)
            optimizer.step()

    workers(1, body)
    assert shapes == [[(4, 6), (4, 1), (4, 2)]] * 2


@pytest.mark.parametrize("zero", [1, 3])
def test_micro_batches_of_a_model_that_is_shared_out(zero: Any) -> None:
    def body(run: Run) -> torch.Tensor:
        model = net()
        model, optimizer, loader = run.prepare(
            model, sgd(model), batches(36, 12), cut=pl.shard(zero=zero)
        )
        for x, y in loader:
            optimizer.zero_grad()
            run.step(model, x, y, loss=F.mse_loss, micro_batches=2)
            optimizer.step()
        out: torch.Tensor = run.forward(model, torch.ones(1, 6, dtype=torch.float64))
        return out

    def alone(run: Run) -> torch.Tensor:
        model = net()
        model, optimizer, loader = run.prepare(model, sgd(model), batches(36, 12))
        for x, y in loader:
            optimizer.zero_grad()
            run.step(model, x, y, loss=F.mse_loss)
            optimizer.step()
        return model(torch.ones(1, 6, dtype=torch.float64)).detach()

    (wanted,) = workers(1, alone)
    for found in workers(2, body, mesh="shard=2"):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "many", True])
def test_what_is_no_number_of_micro_batches(wrong: Any) -> None:
    def body(run: Run) -> None:
        model, x = net(), torch.ones(2, 6, dtype=torch.float64)
        run.prepare(model, sgd(model))
        with pytest.raises(UsageError, match="micro_batches"):
            run.step(model, x, x[:, :2], loss=F.mse_loss, micro_batches=wrong)

    workers(1, body)
