"""Optimizers that step where it can't be right are refused, whoever holds them; those that can
go on as they are.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.errors import UsageError
from paceline.prepare.optimizers import StepHook
from paceline.servers.worker.strategy import ParameterServer
from paceline.session.run import Run
from paceline.sync.base import Strategy
from paceline.sync.localsgd.strategy import LocalSGD
from tests.harness.models import net, sgd
from tests.harness.runs import alone, batches, distance, parameters, workers


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> Tensor:
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return parameters(model)


# ---- not prepared


def test_an_optimizer_that_was_not_prepared_trains_beside_allreduce() -> None:
    def body(run: Run) -> Tensor:
        model = net()
        model, loader = run.prepare(model, batches())
        return train(model, sgd(model), loader)

    wanted = alone(body)
    for found in workers(2, body) + workers(3, body):
        assert distance(found, wanted) < 1e-12


class Slow(torch.optim.Optimizer):
    """Has another optimizer, and goes half of its way (Zhang et al. 2019, Lookahead)."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        before = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.inner.step()
        with torch.no_grad():
            for p, old in zip(
                (p for group in self.param_groups for p in group["params"]), before, strict=True
            ):
                p.lerp_(old, 0.5)


def test_an_optimizer_inside_of_a_prepared_one_needn_t_be_prepared() -> None:
    def body(run: Run) -> Tensor:
        model = net()
        model, optimizer, loader = run.prepare(model, Slow(sgd(model)), batches())
        return train(model, optimizer, loader)

    wanted = alone(body)
    for found in workers(2, body):
        assert distance(found, wanted) < 1e-12


class Ascent(torch.optim.Optimizer):
    """Steps up, and then from where it was (Foret et al. 2021, SAM), as scripts copy it: the
    steps are methods of its own.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.before = inner, list[Tensor]()

    @torch.no_grad()
    def first_step(self) -> None:
        known = [p for group in self.param_groups for p in group["params"]]
        self.before = [p.clone() for p in known]
        for p in known:
            p.add_(p.grad, alpha=0.1)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p, old in zip(
            (p for group in self.param_groups for p in group["params"]), self.before, strict=True
        ):
            p.copy_(old)
        self.inner.step()
        self.zero_grad()


@pytest.mark.parametrize("size", [1, 2])
def test_one_inside_may_step_by_itself(size: int) -> None:
    def body(run: Run) -> Tensor:
        model = net()
        model, optimizer, loader = run.prepare(model, Ascent(sgd(model)), batches())
        for x, y in loader:
            F.mse_loss(model(x), y).backward()
            optimizer.first_step()
            F.mse_loss(model(x), y).backward()
            optimizer.second_step()
        return parameters(model)

    wanted = alone(body)
    for found in workers(size, body):
        assert distance(found, wanted) < 1e-12


def test_it_is_refused_beside_servers() -> None:
    def body(run: Run) -> None:
        model, other = net(), net(1)
        model, _, loader = run.prepare(model, sgd(model), batches())
        run.prepare(other)
        for x, y in loader:
            F.mse_loss(other(model(x)[:, :1].expand(-1, 6)), y).backward()
            with pytest.raises(UsageError, match="optimizers step on servers"):
                sgd(other).step()
            return

    workers(2, body, strategy=ParameterServer(servers=1))


def test_an_optimizer_of_something_else_steps_as_it_likes_and_is_told_once() -> None:
    def body(run: Run) -> int:
        strange: list[Any] = []
        run._watch._note_unprepared = lambda optimizer, ours: strange.append((optimizer, ours))
        model, other = net(), net(1)
        model, _, loader = run.prepare(model, sgd(model), batches())
        mine = sgd(other)
        before = parameters(other)
        train(other, mine, [(x, y) for x, y in loader])
        assert not torch.equal(parameters(other), before)
        assert strange == [(mine, False)]
        return len(strange)

    assert workers(2, body) == [1, 1]


def test_nobody_is_told_after_the_run() -> None:
    """Torch's hook stays: its list can't change while another thread's step goes through it."""
    model = net()

    def told() -> list[int]:
        return [len(hook.watches) for hook in StepHook.all()]

    def body(run: Run) -> Any:
        train(*run.prepare(model, sgd(model), batches()))
        assert told() == [1]
        return run._watch

    watch = alone(body)
    assert told() == [0]
    watch.end_watching()
    with pytest.raises(RuntimeError, match="on purpose"):
        workers(2, fail)
    assert told() == [0]


def test_runs_end_while_another_thread_steps() -> None:
    """A run's end changes nothing that a step of this one goes through."""
    model, over = net(), threading.Event()
    optimizer = sgd(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def body(run: Run) -> None:
        train(*run.prepare(other := net(1), sgd(other), batches()))
        run.close()

    def slow(stepping: torch.optim.Optimizer, *_: Any) -> None:
        if stepping is optimizer:
            alone(body)
            over.set()

    handle = register_optimizer_step_pre_hook(slow)
    try:
        alone(body)
        optimizer.step()
    finally:
        handle.remove()
    assert over.is_set()


def fail(run: Run) -> None:
    raise RuntimeError("on purpose")


# ---- inside of backward


def in_backward(model: nn.Module, optimizers: dict[Any, torch.optim.Optimizer]) -> None:
    """As torch's tutorial has it."""

    def hook(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)


@pytest.mark.parametrize("strategy", [None, LocalSGD(2)])
@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("first", ["hook", "prepare"])
def test_a_step_in_a_hook_is_refused(first: str, prepared: bool, strategy: Strategy | None) -> None:
    def body(run: Run) -> None:
        model = net()
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        if first == "hook":
            in_backward(model, optimizers)
        loader = run.prepare(batches(), model, *(optimizers.values() if prepared else ()))[0]
        if first == "prepare":
            in_backward(model, optimizers)
        before = parameters(model)
        for x, y in loader:
            with pytest.raises(
                UsageError, match=r"step was called inside of loss.backward\(\).*take the hook out"
            ):
                F.mse_loss(model(x), y).backward()
            assert torch.equal(parameters(model), before)
            raise EOFError  # a backward that has failed is not gone on from

    with pytest.raises(EOFError):
        workers(2, body, strategy=strategy)


def test_a_step_in_a_hook_of_one_worker_alone_works_as_without_paceline() -> None:
    def plain() -> Tensor:
        model = net()
        in_backward(model, {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()})
        for x, y in batches():
            F.mse_loss(model(x), y).backward()
        return parameters(model)

    def body(run: Run) -> Tensor:
        model = net()
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        in_backward(model, optimizers)
        loader = run.prepare(batches(), model, *optimizers.values())[0]
        for x, y in loader:
            F.mse_loss(model(x), y).backward()
        return parameters(model)

    assert distance(alone(body), plain()) < 1e-12


def test_a_hook_that_only_looks_sees_the_share_if_it_was_there_first() -> None:
    def body(run: Run) -> list[bool]:
        model = net()
        seen: list[tuple[Tensor, Tensor]] = []
        model[2].bias.register_post_accumulate_grad_hook(lambda p: seen.append((p, p.grad.clone())))
        model, optimizer, loader = run.prepare(model, sgd(model), batches())
        apart = []
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            (local,) = torch.autograd.grad(F.mse_loss(model(x), y), model[2].bias)
            apart.append(
                torch.allclose(seen[-1][1], local) and not torch.allclose(model[2].bias.grad, local)
            )
            optimizer.step()
        return apart

    for found in workers(2, body):
        assert all(found)
