"""Dropout under a cut: equal where activations are whole, independent where they are cut, and the
same when layers run again.

Threads share one generator, so ranks are processes here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.cluster.store import Store
from paceline.comm.group_protocol import Group
from paceline.comm.shm.shared_group import SharedGroup
from paceline.parallel.tensor.random_zone import RandomZone
from paceline.parallel.tensor.styles import column, row, sequence
from paceline.parallel.tensor.tensor_cut import tensor
from tests.harness.processes import fork
from tests.harness.tensor_cuts import context_of

CPU = torch.device("cpu")


class Noted(nn.Dropout):
    """Dropout of ones, which shows its mask; notes what it drew, also when it runs again."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        mask = super().forward(torch.ones_like(x))
        self.masks.append(mask.detach())
        return x * mask


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.inside, self.down, self.outside = (
            nn.Linear(8, 16),
            Noted(),
            nn.Linear(16, 8),
            Noted(),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.outside(self.down(self.inside(self.up(x))))
        return out


def masks(group: Group, pieces: bool, again: bool) -> dict[str, list[Tensor]]:
    """The masks of two blocks and two steps."""
    torch.manual_seed(group.rank)  # differs, until the model is cut
    model = nn.Sequential(nn.Sequential(Block(), Block()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    cut = {"0.*.up": column(), "0.*.down": row(), **({"0": sequence()} if pieces else {})}
    tensor(cut).apply(model, context_of(group))
    for _ in range(2):
        x = torch.ones(2, 4, 8, requires_grad=True)
        y = model(x) if not again else checkpoint(model, x, use_reentrant=False)
        y.sum().backward()
    found = {name: part.masks for name, part in model.named_modules() if isinstance(part, Noted)}
    return {**found, "after": [torch.rand(8)]}


def on_two(pieces: bool, again: bool) -> list[dict[str, list[Tensor]]]:
    def body(rank: int, size: int, store: Store) -> Any:
        group = SharedGroup.from_store(store, rank, size)
        found = {
            name: [mask.tolist() for mask in some]
            for name, some in masks(group, pieces, again).items()
        }
        group.close()
        return found

    return [
        {name: [torch.tensor(mask) for mask in some] for name, some in found.items()}
        for found in fork(2, body)
    ]


def test_masks_are_equal_where_activations_are_whole_and_differ_where_they_are_cut() -> None:
    one, two = on_two(pieces=False, again=False)
    for name in ("0.0", "0.1"):
        assert all(
            torch.equal(a, b)
            for a, b in zip(one[f"{name}.outside"], two[f"{name}.outside"], strict=True)
        )
        assert all(
            not torch.equal(a, b)
            for a, b in zip(one[f"{name}.inside"], two[f"{name}.inside"], strict=True)
        )
    inside = [
        mask for found in (one, two) for name in ("0.0", "0.1") for mask in found[f"{name}.inside"]
    ]
    # of each rank, block and step another
    assert len({tuple(mask.flatten().tolist()) for mask in inside}) == 8
    assert torch.equal(one["after"][0], two["after"][0])


def test_masks_of_pieces_differ_everywhere() -> None:
    one, two = on_two(pieces=True, again=False)
    for name in ("0.0.inside", "0.0.outside", "0.1.inside", "0.1.outside"):
        assert all(not torch.equal(a, b) for a, b in zip(one[name], two[name], strict=True))
    assert torch.equal(one["after"][0], two["after"][0])


def test_layers_that_run_again_draw_the_same() -> None:
    for pieces in (False, True):
        for found in on_two(pieces, again=True):
            for name in ("0.0.inside", "0.0.outside", "0.1.inside"):
                first, second, third, fourth = found[name]  # forward, again, forward, again
                assert torch.equal(first, second), name
                assert torch.equal(third, fourth), name
                assert not torch.equal(first, third)


def test_nothing_drawn_leaves_the_generator_as_it_was() -> None:
    before = torch.get_rng_state()
    zone = RandomZone(1)
    zone.enter_zone(CPU)
    zone.enter_zone(CPU)
    zone.leave_zone(CPU)
    zone.leave_zone(CPU)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_drawn_moves_the_generator_on_alike_on_all_ranks() -> None:
    before = torch.get_rng_state()
    after, drawn = [], []
    for rank in range(2):
        torch.set_rng_state(before)
        zone = RandomZone(rank)
        zone.enter_zone(CPU)
        drawn.append(torch.rand(4))
        zone.leave_zone(CPU)
        after.append(torch.get_rng_state())
    assert torch.equal(*after)
    assert not torch.equal(after[0], before)
    assert not torch.equal(*drawn)
