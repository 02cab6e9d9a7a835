"""Gradients that a script sets itself go on where they are the same on all workers, and are
refused where they aren't.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.parallel.shard import shard
from paceline.replicas.manual_gradients import _is_near, _measure_gradient
from paceline.session.run import Run
from paceline.sync.localsgd.strategy import LocalSGD
from tests.harness.models import net, sgd
from tests.harness.runs import alone, batches, distance, parameters, workers

Set = Callable[[Run, nn.Module, Tensor, Tensor], None]


def loop(set_gradients: Set, prepared: bool = True) -> Callable[[Run], Tensor]:
    """Trains by gradients that are set by hand."""

    def body(run: Run) -> Tensor:
        model = net()
        optimizer = sgd(model)
        model, loader, *_ = run.prepare(model, batches(), *([optimizer] if prepared else []))
        for x, y in loader:
            optimizer.zero_grad()
            set_gradients(run, model, x, y)
            optimizer.step()
        return parameters(model)

    return body


def local(run: Run, model: nn.Module, x: Tensor, y: Tensor) -> None:
    names = list(model.parameters())
    for p, g in zip(names, torch.autograd.grad(F.mse_loss(model(x), y), names), strict=True):
        p.grad = g


def functional(run: Run, model: nn.Module, x: Tensor, y: Tensor) -> None:
    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(torch.func.functional_call(model, parameters, (x,)), y)

    found = torch.func.grad(loss)(dict(model.named_parameters()))
    for name, p in model.named_parameters():
        p.grad = found[name].detach()


def mixed(run: Run, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """After a backward, of one parameter, on one worker."""
    F.mse_loss(model(x), y).backward()
    if run.rank == 1:
        model[2].bias.grad = model[2].bias.grad * 2


def meant(run: Run, model: nn.Module, x: Tensor, y: Tensor) -> None:
    local(run, model, x, y)
    for p in model.parameters():
        p.grad = run.mean(p.grad)


def derived(run: Run, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """New tensors made of gradients that are the mean already."""
    F.mse_loss(model(x), y).backward()
    for p in model.parameters():
        p.grad = p.grad * 0.5 + 0.01 * p.detach()


def in_place(run: Run, model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.mse_loss(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for p in model.parameters():
        p.grad.add_(p.detach(), alpha=0.01)


@pytest.mark.parametrize(
    ("how", "name"), [(local, "0.weight"), (functional, "0.weight"), (mixed, "2.bias")]
)
@pytest.mark.parametrize("prepared", [True, False])
def test_what_differs_is_refused_on_all_before_anything_steps(
    how: Set, name: str, prepared: bool
) -> None:
    caught: list[str] = []

    def body(run: Run) -> None:
        try:
            loop(how, prepared)(run)
        except UsageError as error:
            caught.append(str(error))
            raise

    with pytest.raises(UsageError):
        workers(3, body)
    assert len(caught) == 3
    for text in caught:
        assert re.match(
            (
                rf"p.grad of {name} was set by the script, and differs between workers \(rank 0: "
                r"norm .*; rank 1: norm "
            ),
            text,
        )
        assert "run.mean(g)" in text


@pytest.mark.parametrize("how", [meant, derived, in_place])
def test_what_is_the_same_goes_on(how: Set) -> None:
    wanted = alone(loop(how))
    for size in (2, 3):
        for found in workers(size, loop(how)):
            assert distance(found, wanted) < 1e-12


@pytest.mark.parametrize("zero", [1, 3])
def test_parts_of_a_cut_model_are_compared_with_those_of_other_replicas(
    zero: Literal[1, 3],
) -> None:
    def body(run: Run) -> Tensor:
        model = net()
        optimizer = sgd(model)
        model, optimizer, loader = run.prepare(
            model, optimizer, batches(), cut=shard(zero=zero) if run.size > 1 else None
        )
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            for p in optimizer.param_groups[0]["params"]:
                p.grad = p.grad * (0.5 if run.rank != 3 or run.steps != wrong else 0.4)
            optimizer.step()
        return parameters(model) if zero == 1 else torch.zeros(1)

    wrong = -1
    wanted = alone(body)
    assert all(
        distance(found, wanted) < 1e-12
        for found in workers(4, body, mesh="data=2, shard=2")
        if zero == 1
    )
    workers(2, body, mesh="shard")
    wrong = 1
    with pytest.raises(
        UsageError, match=r"differs between workers \(rank 1: norm .*; rank 3: norm [^;]*\)"
    ):
        workers(4, body, mesh="data=2, shard=2")


def test_steps_without_a_loader_are_looked_at_too() -> None:
    def body(run: Run) -> None:
        model = net()
        model, optimizer = run.prepare(model, sgd(model))
        for x, y in batches():
            local(run, model, x[run.rank :: 2], y[run.rank :: 2])
            optimizer.step()

    with pytest.raises(UsageError, match="was set by the script"):
        workers(2, body)


def test_later_steps_are_looked_at_when_workers_meet_anyway() -> None:
    """After the first steps it takes until the next meeting, and no more steps are made then."""

    def body(run: Run) -> int:
        model = net()
        model, optimizer, loader = run.prepare(model, sgd(model), batches(400, 4))
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            if run.steps >= 3:
                # as if a second had gone by
                run._collector._meetings.next_step = min(run._collector._meetings.next_step, 10)
                local(run, model, x, y)
            optimizer.step()
        return run.steps

    with pytest.raises(UsageError, match="was set by the script"):
        workers(2, body)


def test_local_strategies_take_what_is_set() -> None:
    first, second = workers(2, lambda run: (loop(local)(run), run.close())[0], strategy=LocalSGD(5))
    assert torch.equal(first, second)


def test_rounding_is_no_difference_and_everything_else_is() -> None:
    g = torch.randn(100, generator=torch.Generator().manual_seed(0))
    near = _measure_gradient(g * (1 + 1e-6))
    assert (
        _is_near(_measure_gradient(g), near)
        and _is_near(_measure_gradient(g.to(torch.complex64)), near)
        and _is_near(_measure_gradient(g.to_sparse()), near)
    )
    assert (
        not _is_near(_measure_gradient(g), _measure_gradient(g * 1.01))
        and not _is_near(_measure_gradient(g), _measure_gradient(-g))
        and not _is_near(_measure_gradient(g), None)
    )
    nan = torch.full((3,), float("nan"))
    assert (
        _is_near(None, None)
        and _is_near(_measure_gradient(nan), _measure_gradient(nan))
        and not _is_near(_measure_gradient(nan), _measure_gradient(g))
    )
