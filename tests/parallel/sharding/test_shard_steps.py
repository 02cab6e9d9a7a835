"""Whole parameters follow the steps of their pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.parallel.elementwise import elementwise
from paceline.parallel.shard import shard
from tests.harness.runs import distance
from tests.harness.sharded import Trainee, fitting, refused, same, train
from tests.harness.sharded_models import odd_net, vectors

STAGES = pytest.mark.parametrize("zero", [1, 2, 3])


@pytest.mark.parametrize("zero", [1, 2])
def test_averages_of_the_model(zero: Any) -> None:
    def ended(one: Trainee) -> Tensor:
        average = torch.optim.swa_utils.AveragedModel(
            one.model, avg_fn=lambda old, new, count: 0.9 * old + 0.1 * new
        )
        fitting(vectors)(one, 9)
        average.update_parameters(one.model)
        fitting(vectors)(one, 10)
        average.update_parameters(one.model)
        out: Tensor = average(vectors(0)[0]).detach()
        return out

    wanted = train(1, odd_net, fitting(vectors), None, ended=ended)[0][1]
    for _, found in train(2, odd_net, fitting(vectors), shard("blocks.*", zero=zero), ended=ended):
        assert distance(found, wanted) < 1e-12


@STAGES
def test_two_optimizers_and_groups(zero: Any) -> None:
    @elementwise
    class Both(torch.optim.SGD):
        """Steps two groups with rates of their own."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        every = list(parameters)
        return Both(
            [{"params": every[:3], "lr": 0.05}, {"params": every[3:], "weight_decay": 0.1}], lr=0.1
        )

    same(odd_net, fitting(vectors), shard("blocks.*", zero=zero), 3, optimizer=optimizer)


def test_an_optimizer_of_whole_parameters_is_refused() -> None:
    def step(one: Trainee, number: int) -> None:
        torch.optim.SGD(one.model.parameters(), lr=0.1).step()

    refused(
        shard("blocks.*", zero=2),
        "make the optimizer before run.prepare, and give it to the call that cuts the model",
        step=step,
    )


@pytest.mark.parametrize("zero", [1, 2])
def test_gradients_that_a_script_sets_are_refused(zero: Any) -> None:
    """Nothing would step by them."""

    def step(one: Trainee, number: int) -> None:
        for parameter in one.model.parameters():
            parameter.grad = torch.zeros_like(parameter) + number
        one.optimizer.step()

    with pytest.raises(
        UsageError, match=r"inward.weight was given a gradient by the script .*run.whole"
    ):
        train(2, odd_net, step, shard("blocks.*", zero=zero), steps=2)
