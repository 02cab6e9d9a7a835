"""Several optimizers of one loop body, whose batches are cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.session.run import Run
from paceline.sync.localsgd.strategy import LocalSGD
from paceline.sync.parameterserver.strategy import ParameterServer
from tests.harness.models import net
from tests.harness.runs import alone, batches, distance, parameters, workers


class Both(NamedTuple):
    """Two models, and the optimizer of each."""

    one: Any
    two: Any
    first: Any
    second: Any


Body = Callable[[Both, Tensor, Tensor, int], None]


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(run: Run, body: Body, accumulate: int | None = None) -> Tensor:
    """Two models, whose optimizers `body` steps."""
    one, two = net(1), net(2)
    options: dict[str, Any] = {} if accumulate is None else {"accumulate": accumulate}
    one, two, first, second, loader = run.prepare(one, two, momentum(one), momentum(two), batches(24), **options)
    for x, y in loader:
        body(Both(one, two, first, second), x, y, run.steps)
    run._loop.finish()
    return parameters(one, two)


def beside(model: nn.Module) -> Tensor:
    """A loss whose gradient doesn't depend on the parameters, which it reaches."""
    return torch.stack([0.3 * p.sum() for p in model.parameters()]).sum()


def each_clears_its_own(both: Both, x: Tensor, y: Tensor, step: int) -> None:
    both.first.zero_grad()
    F.mse_loss(both.one(x), y).backward()
    both.first.step()
    both.second.zero_grad(set_to_none=False)
    F.mse_loss(both.two(x), y).backward()
    both.second.step()


def the_second_reaches_both(both: Both, x: Tensor, y: Tensor, step: int) -> None:
    both.first.zero_grad()
    F.mse_loss(both.one(x), y).backward()
    both.first.step()
    both.second.zero_grad()
    (F.mse_loss(both.two(x), y) + beside(both.one)).backward()
    both.second.step()


def the_first_reaches_both(both: Both, x: Tensor, y: Tensor, step: int) -> None:
    both.first.zero_grad()
    both.second.zero_grad()
    (F.mse_loss(both.one(x), y) + beside(both.two)).backward()
    both.first.step()
    both.two.zero_grad()
    F.mse_loss(both.two(x), y).backward()
    both.second.step()


def one_steps_in_every_other_turn(both: Both, x: Tensor, y: Tensor, step: int) -> None:
    both.first.zero_grad()
    if step % 2 == 0:
        both.second.zero_grad()
    (F.mse_loss(both.one(x), y) + F.mse_loss(both.two(x), y)).backward()
    both.first.step()
    if step % 2:
        both.second.step()


def by_closures(both: Both, x: Tensor, y: Tensor, step: int) -> None:
    for model, optimizer in ((both.one, both.first), (both.two, both.second)):

        def closure(model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


BODIES = [each_clears_its_own, the_second_reaches_both, the_first_reaches_both, one_steps_in_every_other_turn, by_closures]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_each_optimizer_takes_what_lies_between_its_zero_grad_and_its_step(body: Body) -> None:
    wanted = alone(lambda run: train(run, body))
    assert distance(alone(lambda run: train(run, body, 3)), wanted) < 1e-12
    for found in workers(2, lambda run: train(run, body, 2)):
        assert distance(found, wanted) < 1e-12


@pytest.mark.parametrize("strategy", [LocalSGD(every=1), ParameterServer()], ids=repr)
def test_other_strategies_take_the_same(strategy: Any) -> None:
    def plain(both: Both, x: Tensor, y: Tensor, step: int) -> None:
        for model, optimizer in ((both.one, both.first), (both.two, both.second)):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()

    found = workers(2, lambda run: train(run, plain, 2), strategy=strategy)
    wanted = workers(2, lambda run: train(run, plain), strategy=strategy)
    assert distance(found[0], wanted[0]) < 1e-12


def test_a_scaler_puts_steps_off_too() -> None:
    def scaled(run: Run, accumulate: int | None = None) -> Tensor:
        scaler: Any = run.prepare(torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2))

        def body(both: Both, x: Tensor, y: Tensor, step: int) -> None:
            for model, optimizer in ((both.one, both.first), (both.two, both.second)):
                optimizer.zero_grad()
                scaler.scale(F.mse_loss(model(x), y)).backward()
                scaler.unscale_(optimizer)
                run.clip(model, 0.2)
                scaler.step(optimizer)
            scaler.update()

        return train(run, body, accumulate)

    wanted = alone(scaled)
    for found in workers(2, lambda run: scaled(run, 2)):
        assert distance(found, wanted) < 1e-12


def test_a_second_step_in_a_turn_is_refused() -> None:
    def body(both: Both, x: Tensor, y: Tensor, step: int) -> None:
        for _ in range(2):
            both.first.zero_grad()
            F.mse_loss(both.one(x), y).backward()
            both.first.step()

    with pytest.raises(UsageError, match=r"SGD.step was called twice in a micro-batch, on different gradients: with accumulate"):
        alone(lambda run: train(run, body, 2))


def test_an_optimizer_that_calls_its_closure_twice_is_refused() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            return super().step(closure)

    def body(run: Run) -> None:
        model = net()
        model, optimizer, loader = run.prepare(model, Twice(model.parameters(), lr=0.1), batches(8), accumulate=2)
        for x, y in loader:

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)

    with pytest.raises(UsageError, match="Twice calls its closure twice in a step: with accumulate"):
        alone(body)


def decay(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.add_(p.detach(), alpha=0.1)


def test_a_gradient_that_the_script_changes_in_each_micro_batch_is_refused() -> None:
    def body(both: Both, x: Tensor, y: Tensor, step: int) -> None:
        F.mse_loss(both.one(x), y).backward()
        decay(both.one)
        both.first.step()
        both.first.zero_grad()

    with pytest.raises(UsageError, match=r"p.grad of model0.0.weight was changed by the script in a micro-batch before the last"):
        alone(lambda run: train(run, body, 2))
    assert torch.isfinite(alone(lambda run: train(run, body))).all()


def zeroed_at_the_top(both: Both, x: Tensor, y: Tensor, step: int) -> None:
    for p in both.one.parameters():
        if p.grad is not None:
            p.grad.zero_()
    F.mse_loss(both.one(x), y).backward()
    both.first.step()


def set_by_hand(both: Both, x: Tensor, y: Tensor, step: int) -> None:
    known = list(both.one.parameters())
    both.first.zero_grad()
    for p, g in zip(known, torch.autograd.grad(F.mse_loss(both.one(x), y), known), strict=True):
        p.grad = g
    both.first.step()


def added_by_hand(both: Both, x: Tensor, y: Tensor, step: int) -> None:
    known = list(both.one.parameters())
    both.first.zero_grad(set_to_none=False)
    for p, g in zip(known, torch.autograd.grad(F.mse_loss(both.one(x), y), known), strict=True):
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad += g
    both.first.step()


def replaced(both: Both, x: Tensor, y: Tensor, step: int) -> None:
    F.mse_loss(both.one(x), y).backward()
    for p in both.one.parameters():
        p.grad = p.grad * 0.5
    both.first.step()
    both.first.zero_grad()


BY_HAND = {
    zeroed_at_the_top: "was changed by the script after the step of a micro-batch before the last",
    set_by_hand: "was set by the script in a micro-batch before the last",
    added_by_hand: "was set by the script in a micro-batch before the last",
    replaced: "was changed by the script in a micro-batch before the last",
}


@pytest.mark.parametrize("body", BY_HAND, ids=lambda body: body.__name__)
def test_gradients_by_hand_in_each_micro_batch_are_refused(body: Body) -> None:
    with pytest.raises(UsageError, match=rf"p.grad of model0\S+ {BY_HAND[body]}"):
        alone(lambda run: train(run, body, 2))


def set_to_zeros_at_the_top(both: Both, x: Tensor, y: Tensor, step: int) -> None:
    for p in both.one.parameters():
        p.grad = torch.zeros_like(p)
    F.mse_loss(both.one(x), y).backward()
    both.first.step()


def zeroed_of_another_loss(both: Both, x: Tensor, y: Tensor, step: int) -> None:
    for p in both.one.parameters():
        if p.grad is not None:
            p.grad.zero_()
    F.mse_loss(both.one(x), y).backward()
    both.first.step()
    both.second.zero_grad()
    (F.mse_loss(both.two(x), y) + beside(both.one)).backward()
    both.second.step()


def some_were_there_before(both: Both, x: Tensor, y: Tensor, step: int) -> None:
    """No backward comes to the second model after the first turn, nor does zero_grad."""
    if step == 0:
        F.mse_loss(both.two(x), y).backward()
    both.first.zero_grad()
    F.mse_loss(both.one(x), y).backward()
    both.first.step()
    both.second.step()


@pytest.mark.parametrize("body", [set_to_zeros_at_the_top, zeroed_of_another_loss, some_were_there_before], ids=lambda body: body.__name__)
def test_others_by_hand_are_right(body: Body) -> None:
    wanted = alone(lambda run: train(run, body))
    for size in (1, 2):
        for found in workers(size, lambda run: train(run, body, 2)):
            assert distance(found, wanted) < 1e-12


def test_a_scaler_that_was_not_prepared_is_refused() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def body(both: Both, x: Tensor, y: Tensor, step: int) -> None:
        scaler.scale(F.mse_loss(both.one(x), y)).backward()
        scaler.step(both.first)
        scaler.update()
        both.first.zero_grad()

    with pytest.raises(UsageError, match=r"a GradScaler steps that was not given to run.prepare: with accumulate it would divide"):
        alone(lambda run: train(run, body, 2))
    with pytest.raises(UsageError, match=r"a GradScaler steps that was not given to run.prepare: servers have had the gradients"):
        workers(2, lambda run: train(run, body), strategy=ParameterServer())


@pytest.mark.parametrize("prepared", [True, False])
def test_a_scheduler_steps_with_the_last_micro_batch_or_is_refused(prepared: bool) -> None:
    def scheduled(run: Run, accumulate: int | None = None) -> Tensor:
        schedulers: list[Any] = []

        def body(both: Both, x: Tensor, y: Tensor, step: int) -> None:
            if not schedulers:
                schedulers.append(torch.optim.lr_scheduler.ExponentialLR(both.first, 0.5))
                if prepared:
                    run.prepare(schedulers[0])
            F.mse_loss(both.one(x), y).backward()
            both.first.step()
            schedulers[0].step()
            both.first.zero_grad()

        return train(run, body, accumulate)

    if prepared:
        assert distance(alone(lambda run: scheduled(run, 2)), alone(scheduled)) < 1e-12
        return
    with pytest.raises(UsageError, match=r"the learning rate of SGD went from 0.1 to 0.05 between micro-batches of one batch: give its"):
        alone(lambda run: scheduled(run, 2))
