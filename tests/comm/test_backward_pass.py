"""The pass that runs in a thread is known from within, and calls back at its end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.comm.backward_pass import (
    call_at_end_of_backward,
    current_pass_id,
    is_inside_backward,
)


def test_a_pass_is_known_from_within_and_calls_back_at_its_end_in_order() -> None:
    said: list[Any] = []

    def hook(grad: Tensor) -> None:
        call_at_end_of_backward(lambda: said.append("first"))
        call_at_end_of_backward(lambda: said.append("second"))
        said.append(is_inside_backward())

    x = torch.ones(3, requires_grad=True)
    between = x * 2
    between.register_hook(hook)
    assert not is_inside_backward() and current_pass_id() == -1
    between.sum().backward()
    assert said == [True, "first", "second"] and not is_inside_backward()
