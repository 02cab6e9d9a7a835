"""Hooks on gradients are off for a while, and back afterwards, whatever happens."""

from __future__ import annotations

import pytest
import torch

from paceline.parallel.gradient_hooks import without_gradient_hooks


def test_hooks_are_called_neither_by_grad_nor_by_backward_and_are_back_in_their_order() -> None:
    one, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    called = list[int]()
    for number in range(2):
        one.register_hook(lambda grad, number=number: called.append(number))
    with pytest.raises(KeyError), without_gradient_hooks([one, other]):
        torch.autograd.grad((one * other).sum(), [one, other])
        (one * other).sum().backward()
        raise KeyError
    assert not called
    (one * other).sum().backward()
    assert called == [0, 1]
