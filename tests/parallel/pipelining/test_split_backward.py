"""Backward in two halves gives what a whole one gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.parallel.pipelining.split_backward import (
    compute_input_gradients,
    compute_weight_gradients,
)
from tests.harness.models import fill


class Odd(nn.Module):
    """Parameters before, beside and apart from what comes in, one used twice, one not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.beside, self.unused = (
            nn.Linear(4, 6),
            nn.Linear(6, 4),
            nn.Embedding(3, 4),
            nn.Linear(2, 2),
        )
        self.apart = nn.Parameter(torch.ones(4))

    def forward(
        self, x: torch.Tensor, y: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = torch.relu(self.up(x)) * torch.sigmoid(self.up(y))
        out = self.down(wide) + self.beside.weight[1]
        return out, out.transpose(0, 1), self.apart * 2


def test_two_halves_are_a_whole() -> None:
    model = Odd().double()
    fill(model)
    numbers = torch.Generator().manual_seed(5)
    x, y = (torch.randn(5, 4, generator=numbers, dtype=torch.float64) for _ in range(2))
    grads = [
        torch.randn(shape, generator=numbers, dtype=torch.float64)
        for shape in ((5, 4), (4, 5), (4,))
    ]

    def backward(*, halves: bool) -> list[torch.Tensor | None]:
        model.zero_grad()
        entries = [x.clone().requires_grad_(), y.clone().requires_grad_()]
        outputs = model(*entries)
        parameters = list(model.parameters())
        if not halves:
            torch.autograd.backward(outputs, grads)
            return [*(entry.grad for entry in entries), *(p.grad for p in parameters)]
        hooked = list[int]()
        handles = [
            p.register_post_accumulate_grad_hook(lambda p: hooked.append(id(p))) for p in parameters
        ]
        found, later = compute_input_gradients(outputs, grads, entries)
        assert not hooked
        assert all(p.grad is None for p in parameters)
        compute_weight_gradients(later)
        assert len(hooked) == len(set(hooked)) == sum(p.grad is not None for p in parameters)
        for handle in handles:
            handle.remove()
        return [*found, *(p.grad for p in parameters)]

    wanted, got = backward(halves=False), backward(halves=True)
    assert [grad is None for grad in wanted] == [grad is None for grad in got]
    for one, two in zip(wanted, got, strict=True):
        assert one is None or two is None or torch.allclose(one, two, atol=1e-14, rtol=0)


def test_what_goes_through_as_it_is_has_its_gradient() -> None:
    x = torch.ones(3, requires_grad=True)
    weight = nn.Parameter(torch.ones(3))
    found, later = compute_input_gradients(
        [x, x * weight], [torch.full((3,), 2.0), torch.full((3,), 5.0)], [x]
    )
    compute_weight_gradients(later)
    assert found[0] is not None and found[0].tolist() == [7.0] * 3
    assert weight.grad is not None and weight.grad.tolist() == [5.0] * 3


def test_hooks_of_a_parameter_are_called_once() -> None:
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    weight, apart = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    for parameter in (weight, apart):
        parameter.register_hook(lambda grad: grad * 2)
    _, later = compute_input_gradients([x * weight, apart * 3, y * 1], [torch.ones(3)] * 3, [x, y])
    compute_weight_gradients(later)
    compute_weight_gradients(
        compute_input_gradients([x * weight], [torch.ones(3)], [x])[1]
    )  # the hook is there as before
    assert weight.grad is not None and weight.grad.tolist() == [4.0] * 3
    assert apart.grad is not None and apart.grad.tolist() == [6.0] * 3


def after(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight)


SHARED: dict[str, Callable[..., list[torch.Tensor]]] = {
    "a layer twice": lambda a, b, x: [after(a, after(a, x)) + b],
    "two layers twice, by turns": lambda a, b, x: [after(b, after(a, after(b, after(a, x))))],
    "a weight on the way and beside it": lambda a, b, x: [after(a, x) + b, (a * b).sin()],
}


@pytest.mark.parametrize("name", SHARED)
def test_weights_that_are_used_twice_have_the_sum_of_both_uses(name: str) -> None:
    numbers = torch.Generator().manual_seed(6)
    a, b = (
        nn.Parameter(torch.randn(4, 4, generator=numbers, dtype=torch.float64)) for _ in range(2)
    )
    x = torch.randn(4, 4, generator=numbers, dtype=torch.float64).requires_grad_()
    outputs = SHARED[name](a, b, x)
    grads = [torch.randn(4, 4, generator=numbers, dtype=torch.float64) for _ in outputs]
    wanted = torch.autograd.grad(outputs, [x, a, b], grads)
    found, later = compute_input_gradients(SHARED[name](a, b, x), grads, [x])
    compute_weight_gradients(later)
    for one, two in zip([*found, a.grad, b.grad], wanted, strict=True):
        assert one is not None and torch.allclose(one, two, atol=1e-12, rtol=0)
