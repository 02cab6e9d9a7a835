"""Norms of parts make that of the whole, by which gradients are clipped as torch clips them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.servers.worker.clipping import (
    PendingClip,
    compute_clip_factor,
    compute_gradient_norm,
    find_clipped_optimizers,
)
from paceline.sync.base import Slot


def slots(count: int) -> list[Slot]:
    return [
        Slot(f"p{index}", nn.Parameter(torch.full((3,), index + 1.0)), None)
        for index in range(count)
    ]


@pytest.mark.parametrize("kind", [1.0, 2.0, math.inf])
def test_parts_and_whole_have_the_norm_and_the_factor_that_torch_has(kind: float) -> None:
    here = slots(3)
    for slot in here:
        slot.parameter.grad = slot.parameter.detach() * 10
    parts = [compute_gradient_norm([slot], kind) for slot in here]
    total, factor = PendingClip([0], 5.0, kind).compute_factor(parts)
    assert total == pytest.approx(compute_gradient_norm(here, kind))
    before = [slot.parameter.grad.clone() for slot in here if slot.parameter.grad is not None]
    norm = nn.utils.clip_grad_norm_([slot.parameter for slot in here], 5.0, kind)
    assert total == pytest.approx(float(norm))
    for grad, slot in zip(before, here, strict=True):
        assert slot.parameter.grad is not None and torch.allclose(
            grad * factor, slot.parameter.grad
        )


def test_gradients_that_are_small_enough_stay() -> None:
    assert compute_clip_factor(0.0, 1.0) == 1.0 and compute_clip_factor(0.5, 1.0) == 1.0
    assert compute_clip_factor(2.0, 1.0) == pytest.approx(0.5, rel=1e-5)


def test_a_parameter_without_a_gradient_counts_nothing() -> None:
    one, other = slots(2)
    one.parameter.grad = torch.tensor([3.0, 0.0, 4.0])
    assert compute_gradient_norm([one, other], 2.0) == pytest.approx(5.0)


def test_all_parameters_of_an_optimizer_are_clipped_together() -> None:
    here = slots(4)
    parameters = [slot.parameter for slot in here]
    assert find_clipped_optimizers(parameters[:2], here, [0, 0, 1, 1]) == [0]
    assert find_clipped_optimizers(parameters, here, [0, 0, 1, 1]) == [0, 1]
    for some in (parameters[:1], parameters[:3], [nn.Parameter(torch.ones(1))]):
        with pytest.raises(UsageError, match="all parameters of an optimizer together"):
            find_clipped_optimizers(some, here, [0, 0, 1, 1])
