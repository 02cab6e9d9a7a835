"""Optimizers that step each element by itself: known by their exact class, or vouched for."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import paceline as pl
from paceline.errors import UsageError
from paceline.parallel.elementwise import is_elementwise


class Own(torch.optim.SGD):
    """May do anything."""


def one(kind: Any) -> Optimizer:
    optimizer: Optimizer = kind([nn.Parameter(torch.ones(2, 2))], lr=0.1)
    return optimizer


def test_classes_are_known_exactly() -> None:
    assert all(
        is_elementwise(one(kind))
        for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Rprop)
    )
    assert not any(
        is_elementwise(one(kind))
        for kind in (Own, torch.optim.Adafactor, torch.optim.Muon, torch.optim.LBFGS)
    )


def test_steps_that_are_replaced() -> None:
    scheduled, wrapped, replaced = one(torch.optim.SGD), one(torch.optim.SGD), one(torch.optim.SGD)
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    assert is_elementwise(scheduled)
    wrapped.step = functools.partial(wrapped.step)  # type: ignore[method-assign]
    replaced.step = lambda closure=None: None  # type: ignore[method-assign]
    assert not is_elementwise(wrapped) and not is_elementwise(replaced)


def test_to_vouch_is_for_one_class_alone() -> None:
    class First(Own):
        """Vouched for."""

    class Second(First):
        """Not vouched for."""

    assert pl.elementwise(First) is First
    assert (
        is_elementwise(one(First))
        and not is_elementwise(one(Second))
        and not is_elementwise(one(Own))
    )
    for wrong in (one(Second), torch.nn.Linear, "AdamW"):
        with pytest.raises(
            UsageError, match=r"elementwise\(\) vouches for a class of optimizers, and got"
        ):
            pl.elementwise(wrong)  # type: ignore[type-var]
