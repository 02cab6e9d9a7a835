"""Optimizers step the parameters that there are now, with the options and in the order of those
before.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.optim.lr_scheduler import StepLR

from paceline.errors import UsageError
from paceline.parallel.repoint import repoint_optimizer, reset_adagrad_sums


def cut(*olds: Parameter) -> dict[int, Parameter]:
    return {id(old): Parameter(old.detach()[:1].clone()) for old in olds}


def test_order_groups_and_options_stay_and_schedulers_go_on() -> None:
    one, two, three = (Parameter(torch.ones(2, 2)) for _ in range(3))
    optimizer = torch.optim.AdamW(
        [{"params": [one, two], "lr": 0.5}, {"params": [three], "weight_decay": 0.0}], lr=0.1
    )
    scheduler, new = StepLR(optimizer, 1, gamma=0.1), cut(one, three)
    repoint_optimizer(optimizer, lambda p: new.get(id(p)))
    first, second = optimizer.param_groups
    assert [id(p) for p in first["params"]] == [id(new[id(one)]), id(two)]
    assert [id(p) for p in second["params"]] == [id(new[id(three)])]
    assert (first["lr"], second["lr"], second["weight_decay"]) == (0.5, 0.1, 0.0)
    for p in (*first["params"], *second["params"]):
        p.grad = torch.ones_like(p)
    optimizer.step()
    scheduler.step()
    assert bool((new[id(one)] < 1).all()) and bool((one == 1).all())
    assert (first["lr"], second["lr"]) == pytest.approx((0.05, 0.01))


def test_one_that_has_stepped_is_refused_as_it_is() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    new = cut(model.bias)
    with pytest.raises(
        UsageError, match="the AdamW remembers something of parameters that are cut now"
    ):
        repoint_optimizer(optimizer, lambda p: new.get(id(p)))
    assert optimizer.param_groups[0]["params"][1] is model.bias
    repoint_optimizer(optimizer, lambda p: None)  # nothing of what it remembers leaves


def test_an_adagrad_begins_with_sums_of_parts() -> None:
    """It remembers something of whole parameters as soon as it is made, which is no reason to
    refuse it before it has stepped.
    """
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.5, initial_accumulator_value=0.25)
    new = cut(model.weight)
    repoint_optimizer(optimizer, lambda p: new.get(id(p)))
    reset_adagrad_sums(optimizer)
    part = new[id(model.weight)]
    assert (
        torch.equal(optimizer.state[part]["sum"], torch.full((1, 3), 0.25))
        and model.weight not in optimizer.state
    )
    part.grad, before = torch.ones(1, 3), part.detach().clone()
    optimizer.step()
    assert torch.allclose(part, before - 0.5 / 1.25**0.5)
    again = cut(part)
    with pytest.raises(UsageError, match="the Adagrad remembers something"):
        repoint_optimizer(optimizer, lambda p: again.get(id(p)))
