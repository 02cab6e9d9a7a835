"""An optimizer that was made again from plain data steps as the first one does."""

from __future__ import annotations

import msgpack
import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.servers.process import optimizers


def parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [
        nn.Parameter(torch.randn(size, generator=generator)) for size in ((6, 5), (4, 3), (2, 7))
    ]


def grads(parts: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for part in parts:
        part.grad = torch.randn(part.shape, generator=generator)


@pytest.mark.parametrize("name", optimizers.OPTIMIZER_NAMES)
def test_every_optimizer_of_torch(name):
    """With two groups of other settings, over the wire, and a schedule."""
    mine, theirs = parameters(), parameters()
    kind = getattr(torch.optim, name)
    optimizer = kind([{"params": mine[:2]}, {"params": mine[2:], "lr": 0.01}], lr=0.03)
    if name == "SGD":
        optimizer.param_groups[0].update(momentum=0.9, nesterov=True, weight_decay=0.1)
    found = msgpack.unpackb(msgpack.packb(optimizers.read_settings(optimizer)))
    made = optimizers.make_optimizer(
        optimizers.get_optimizer_name(optimizer), found, [theirs[:2], theirs[2:]]
    )
    told = optimizers.read_settings(optimizer)
    for step in range(5):
        optimizer.param_groups[1]["lr"] *= 0.5
        now = optimizers.read_settings(optimizer)
        changes = optimizers.diff_settings(told, now)
        assert changes == {1: {"lr": 0.01 * 0.5 ** (step + 1)}}
        optimizers.apply_settings(
            made, msgpack.unpackb(msgpack.packb(changes), strict_map_key=False)
        )
        told = now
        grads(mine, step)
        grads(theirs, step)
        optimizer.step()
        made.step()
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(mine, parameters(), strict=True))


def test_a_group_without_parameters_keeps_its_place():
    (first, *_), found = parameters(), [{"lr": 0.1}, {"lr": 0.2}]
    made = optimizers.make_optimizer("SGD", found, [[], [first]])
    before = first.detach().clone()
    first.grad = torch.ones_like(first)
    made.step()
    assert torch.allclose(before - 0.2, first)


def test_settings_that_are_tensors_become_numbers():
    optimizer = torch.optim.Adam(parameters(), lr=torch.tensor(0.25), betas=(0.8, 0.9))
    assert optimizers.read_settings(optimizer)[0]["lr"] == 0.25 and optimizers.read_settings(
        optimizer
    )[0]["betas"] == [0.8, 0.9]


class Own(torch.optim.SGD):
    pass


def test_what_can_t_be_made_elsewhere_is_refused():
    with pytest.raises(
        UsageError, match=r"test_optimizers\.Own, and a server makes its own .* AllReduce"
    ):
        optimizers.get_optimizer_name(Own(parameters(), lr=0.1))
    hooked = torch.optim.SGD(parameters(), lr=0.1)
    hooked.register_step_post_hook(lambda *_: None)
    with pytest.raises(UsageError, match="has hooks on its step"):
        optimizers.get_optimizer_name(hooked)
    odd = torch.optim.SGD(parameters(), lr=0.1)
    odd.param_groups[0]["what"] = object()
    with pytest.raises(UsageError, match="the setting what of an optimizer is a object"):
        optimizers.read_settings(odd)
    for name, settings in (("LBFGS", [{}]), ("os.system", [{}]), ("SGD", [{}, {}])):
        with pytest.raises(UsageError, match="can be made here"):
            optimizers.make_optimizer(name, settings, [parameters()])
