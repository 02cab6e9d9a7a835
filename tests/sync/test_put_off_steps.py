"""What was added up when a step was put off, and what zero_grad drops of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.sync.autograd import ParameterHook
from paceline.sync.put_off_steps import PutOffSteps

LOADER = 1


class Passes:
    """A parameter, and silent passes over it as a tracker makes them."""

    def __init__(self, before: float | None = None) -> None:
        self.parameter = nn.Parameter(torch.zeros(2))
        self.parameter.grad = None if before is None else torch.full((2,), float(before))
        self.hook = ParameterHook(0, "weight", self.parameter)
        self.steps = PutOffSteps({id(self.parameter): self.hook}, self.reclaim)
        self.begun = 0

    def reclaim(self, hook: ParameterHook, grad: Tensor | None) -> None:
        shown, hook.shown = hook.shown, None
        if hook.waiting is not None:
            self.steps.changed(hook)
        elif grad is shown:
            hook.carry = grad

    def micro(self, *, first: bool = False) -> bool:
        return self.steps.begin(LOADER, self.begun, first=first)

    def back(self, value: float) -> None:
        hook, self.begun = self.hook, self.begun + 1
        if hook.shown is None:
            hook.prior = self.parameter.grad if hook.prior is None else hook.prior
        elif self.parameter.grad is not hook.shown:
            self.reclaim(hook, self.parameter.grad)
        hook.shown = None
        self.steps.set_aside(hook)
        addend = torch.full((2,), float(value))
        hook.carry, hook.latest = addend if hook.carry is None else hook.carry + addend, self.begun
        self.steps.come(hook)
        hook.show()

    def step(self) -> None:
        self.steps.put_off([self.parameter], LOADER)

    def zero(self) -> None:
        def own() -> None:
            self.parameter.grad = None

        self.steps.clear([self.parameter], own, LOADER)
        if self.hook.waiting is None and self.parameter.grad is None:
            self.hook.carry = self.hook.shown = None  # as the next pass finds out

    @property
    def grad(self) -> Tensor:
        assert self.parameter.grad is not None
        return self.parameter.grad

    def made(self) -> tuple[float | None, bool]:
        """What a step takes that is made now, and whether some of it was kept apart."""
        apart = self.steps.take([self.parameter])
        grad = self.parameter.grad
        assert self.hook.waiting is None and not self.steps
        return None if grad is None else float(grad[0]), apart


def test_what_comes_after_a_step_is_dropped_and_the_rest_stays() -> None:
    passes = Passes(before=8)
    passes.micro(first=True)
    passes.zero()
    passes.back(1)
    passes.step()
    passes.back(100)  # of another loss
    passes.micro()
    passes.zero()
    passes.zero()  # as model and optimizer both do
    passes.back(2)
    assert passes.made() == (3, False)


def test_what_was_there_before_the_turn_is_part_of_the_step() -> None:
    passes = Passes(before=8)
    passes.micro(first=True)
    passes.back(1)
    passes.step()
    passes.zero()
    assert passes.parameter.grad is not None and float(passes.parameter.grad[0]) == 9
    passes.micro()
    passes.back(2)
    assert passes.made() == (11, False)


def test_without_zero_grad_all_that_came_is_in_the_step() -> None:
    passes = Passes()
    for first in (True, False):
        passes.micro(first=first)
        passes.back(1)
        passes.step()
    passes.micro()
    passes.back(1)
    assert passes.made() == (3, True)


def test_a_gradient_that_the_script_sets_to_none_is_one_that_zero_grad_clears() -> None:
    passes = Passes()
    passes.micro(first=True)
    passes.back(1)
    passes.step()
    passes.parameter.grad = None
    passes.micro()
    passes.back(2)
    assert passes.made() == (3, False)


def test_zero_grad_leaves_earlier_micro_batches_where_no_step_was_put_off() -> None:
    passes = Passes()
    for first in (True, False):
        passes.micro(first=first)
        passes.zero()
        passes.back(1)
    assert passes.made() == (2, False)


def test_what_the_first_micro_batch_drops_without_a_step_is_dropped_in_all() -> None:
    passes = Passes()
    for first in (True, False, False):
        passes.micro(first=first)
        passes.zero()
        passes.back(100)
        passes.zero()
        passes.back(1)
        passes.step()
    assert passes.made() == (3, True)


def test_what_was_joined_to_earlier_micro_batches_can_not_be_dropped() -> None:
    passes = Passes()
    passes.micro(first=True)
    passes.zero()
    passes.back(1)
    passes.step()
    passes.micro()
    passes.zero()
    passes.back(100)
    with pytest.raises(
        UsageError, match=r"zero_grad\(\) would drop gradients of weight that were added to those of the micro-batches before"
    ):
        passes.zero()


def test_what_came_after_a_step_is_in_no_later_one() -> None:
    passes = Passes()
    passes.micro(first=True)
    passes.step()
    passes.back(1)
    passes.micro()
    with pytest.raises(
        UsageError, match=r"a backward reached weight after the step of its optimizer, and zero_grad\(\) doesn't come before"
    ):
        passes.step()


def test_a_step_that_never_comes_leaves_what_zero_grad_has_not_cleared() -> None:
    passes = Passes()
    passes.micro(first=True)
    passes.back(1)
    passes.step()
    assert passes.micro(first=True) and not passes.steps
    assert passes.parameter.grad is not None and float(passes.parameter.grad[0]) == 1
    passes.step()
    passes.zero()
    assert passes.micro(first=True) and passes.parameter.grad is None and passes.hook.carry is None
    assert not passes.micro(first=True)


def test_what_is_zeroed_by_hand_while_a_step_waits_is_refused_unless_the_sum_is_kept_apart() -> None:
    passes = Passes()
    passes.micro(first=True)
    passes.back(1)
    passes.step()
    passes.back(100)  # of another loss
    passes.grad.zero_()
    passes.micro()
    passes.zero()
    passes.back(2)
    passes.step()
    passes.grad.zero_()
    passes.micro()
    with pytest.raises(UsageError, match=r"p.grad of weight was changed by the script after the step of a micro-batch before the last"):
        passes.zero()


@pytest.mark.parametrize("cleared", [False, True])
def test_what_is_zeroed_by_hand_after_a_turn_that_was_left_is_zero(cleared: bool) -> None:
    passes = Passes()
    passes.micro(first=True)
    passes.back(1)
    passes.step()
    if cleared:
        passes.zero()
    passes.grad.zero_()
    assert passes.micro(first=True) and not passes.steps
    assert passes.parameter.grad is None if cleared else not passes.grad.any()


def test_a_gradient_that_was_there_before_is_none_that_the_script_has_set() -> None:
    passes = Passes(before=8)
    passes.micro(first=True)
    passes.step()
    passes.micro()
    passes.back(100)
    passes.zero()
    passes.step()
    passes.micro()
    passes.step()
    assert passes.made()[0] == 8
    passes.micro(first=True)
    passes.grad.add_(1)
    with pytest.raises(UsageError, match=r"p.grad of weight was set by the script in a micro-batch before the last"):
        passes.step()


def test_parameters_that_are_not_followed_keep_their_gradient() -> None:
    table, steps = nn.Parameter(torch.zeros(1)), PutOffSteps({}, lambda hook, grad: None)
    table.grad = kept = torch.ones(1)

    def zero() -> str:
        table.grad = None
        return "cleared"

    steps.put_off([table], LOADER)
    assert steps.clear([table], zero, LOADER) == ("cleared", False) and table.grad is kept
    assert not steps.take([table])
    assert steps.clear([table], zero, None) == ("cleared", False) and table.grad is None
    steps.put_off([table], LOADER)
    steps.forget()
    assert not steps
