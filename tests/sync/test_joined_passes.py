"""Backward passes that count as one: their gradients add up, and leave when they are complete."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.agreement import Agreement
from paceline.comm.group_protocol import Group
from paceline.errors import UsageError
from paceline.sync.allreduce import AllReduce
from paceline.sync.autograd import GradientTracker
from paceline.sync.base import Slot
from paceline.sync.context import StepState, SyncContext
from tests.harness.models import net
from tests.harness.thread_groups import spawn
from tests.harness.trackers import watch_without_loop


def watched(group: Group, model: nn.Module, state: StepState) -> GradientTracker:
    context = SyncContext(
        group, Agreement(group, step=lambda: state.step), state, announce=lambda text: None
    )
    sync = AllReduce().begin(context)
    tracker = watch_without_loop(sync, context)
    tracker.watch_slots(
        [Slot(name, parameter, None) for name, parameter in model.named_parameters()]
    )
    return tracker


def rows(rank: int, count: int = 3) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(40 + rank)
    return [torch.randn(2, 6, generator=numbers, dtype=torch.float64) for _ in range(count)]


def wanted() -> list[Tensor]:
    """Half of the gradient of all rows of two workers, on top of ones."""
    model = net()
    for rank in range(2):
        for x in rows(rank):
            (model(x).square().sum() / 2).backward()
    return [parameter.grad + 1 for parameter in model.parameters() if parameter.grad is not None]


def filled(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def test_passes_add_up_and_the_last_one_is_exchanged() -> None:
    def body(group: Group) -> list[Tensor]:
        model, state = net(), StepState(scale=0.5)
        tracker = watched(group, model, state)
        filled(model)  # what p.grad held stays
        with tracker.join_passes() as passes:
            for number, x in enumerate(rows(group.rank)):
                passes.begin_pass(last=number == 2)
                model(x).square().sum().backward()
                passes.end_pass()
        assert tracker.passes == 1
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    for found in spawn(2, body):
        assert all(
            torch.allclose(one, two, atol=1e-12, rtol=0)
            for one, two in zip(found, wanted(), strict=True)
        )


def test_a_delayed_parameter_leaves_at_the_end() -> None:
    def body(group: Group) -> list[Tensor]:
        model, state = net(), StepState(scale=0.5)
        tracker = watched(group, model, state)
        filled(model)
        delayed = next(model.parameters())
        with tracker.join_passes() as passes:
            passes.delay_gradients([delayed])
            for number, x in enumerate(rows(group.rank)):
                passes.begin_pass(last=number == 2)
                model(x).square().sum().backward()
                passes.end_pass()
            total = passes.accumulated_total(delayed)
            assert total is not None
            passes.set_accumulated(delayed, total * 2)
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    first, *others = wanted()
    for mine, *rest in spawn(2, body):
        assert torch.allclose(mine - 1, (first - 1) * 2, atol=1e-12, rtol=0)
        assert all(
            torch.allclose(one, two, atol=1e-12, rtol=0)
            for one, two in zip(rest, others, strict=True)
        )


def test_what_only_early_passes_reach_leaves_too() -> None:
    def body(group: Group) -> list[Tensor]:
        model, state = net(), StepState(scale=0.5)
        tracker = watched(group, model, state)
        with tracker.join_passes() as passes:
            for number, x in enumerate(rows(group.rank)):
                passes.begin_pass(last=number == 2)
                (model[0](x) if number == 2 else model(x)).square().sum().backward()  # type: ignore[index]
                passes.end_pass()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    model = net()
    for rank in range(2):
        for number, x in enumerate(rows(rank)):
            ((model[0](x) if number == 2 else model(x)).square().sum() / 2).backward()  # type: ignore[index]
    for found in spawn(2, body):
        assert all(
            torch.allclose(one, p.grad, atol=1e-12, rtol=0)
            for one, p in zip(found, model.parameters(), strict=True)
        )  # type: ignore[arg-type]


def test_silent_steps_add_up_to_the_next() -> None:
    def body(group: Group) -> list[Tensor]:
        model, state = net(), StepState(scale=0.5)
        tracker = watched(group, model, state)
        filled(model)
        for number, x in enumerate(rows(group.rank)):
            state.defer_exchange = number < 2
            with tracker.join_passes() as passes:
                assert passes.silent == (number < 2)
                passes.begin_pass(last=True)
                model(x).square().sum().backward()
                passes.end_pass()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    for found in spawn(2, body):
        assert all(
            torch.allclose(one, two, atol=1e-12, rtol=0)
            for one, two in zip(found, wanted(), strict=True)
        )


def test_a_failed_pass_leaves_nothing() -> None:
    def body(group: Group) -> None:
        model, state = net(), StepState(scale=0.5)
        tracker = watched(group, model, state)
        with pytest.raises(KeyError), tracker.join_passes() as passes:
            passes.begin_pass(last=False)
            model(rows(0)[0]).sum().backward()
            raise KeyError
        assert not tracker.open and not tracker.joining
        with pytest.raises(UsageError, match=r"run.step was called inside of loss.backward"):
            x = torch.ones(1, requires_grad=True)
            x.register_hook(lambda grad: tracker.join_passes().__enter__())
            x.sum().backward()

    spawn(2, body)
