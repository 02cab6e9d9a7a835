"""What of a state belongs to parameters that are cut, and what of it a worker writes."""

from __future__ import annotations

import torch
from torch import nn

from paceline.checkpoint.cut_state import find_cut_entries, split_state
from paceline.parallel.placement import Placement, Placements
from paceline.state.versioned import VersionedState


def state() -> tuple[VersionedState, Placements, nn.Module]:
    """A worker's half of a layer that is tied to another, and a layer that isn't cut."""
    model = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(4, 4), nn.Linear(4, 2, bias=False))
    model[2].weight = model[0].weight
    placements = Placements()
    placements.add_placement(
        model[0].weight, Placement.whole("0.weight", (4, 4)).cut_dim(0, [(2, 4)], "tensor")
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return VersionedState(model=model, optimizer=optimizer), placements, model


def test_parameters_and_what_optimizers_keep_of_them() -> None:
    versioned, placements, _ = state()
    parts = dict(zip(versioned.names, versioned.parts, strict=True))
    found = list(find_cut_entries(parts, placements, versioned.take_snapshot().tree))
    assert [(entry.path, entry.is_parameter) for entry in found] == [
        ("model/0.weight", True),
        ("model/0.weight", True),  # under its other name
        ("optimizer/state/0/momentum_buffer", False),
    ]
    assert found[2].description == "momentum_buffer that optimizer keeps for 0.weight"


def test_what_is_written() -> None:
    versioned, placements, model = state()
    parts = dict(zip(versioned.names, versioned.parts, strict=True))
    snapshot = versioned.take_snapshot(copy=False)
    rest, blocks = split_state(snapshot, parts, placements, lambda placement: True)
    assert set(blocks) == {"model/0.weight", "optimizer/state/0/momentum_buffer"}
    assert not set(blocks) & set(rest.tensors) and set(blocks) | set(rest.tensors) == set(
        snapshot.tensors
    )
    ((box, piece),) = blocks["model/0.weight"].blocks
    assert box == ((2, 4), (0, 4)) and torch.equal(piece, model[0].weight.detach())
    assert blocks["model/0.weight"].shape == (4, 4)
    none, nothing = split_state(snapshot, parts, placements, lambda placement: False)
    assert nothing == {} and set(none.tensors) == set(rest.tensors)


def test_strides_of_a_part_are_not_those_of_the_whole() -> None:
    model, placements = nn.Linear(4, 2, bias=False), Placements()
    model.weight = nn.Parameter(torch.ones(4, 2).t())
    versioned = VersionedState(model=model)
    assert "stride" in str(versioned.take_snapshot().tree)
    placements.add_placement(
        model.weight, Placement.whole("weight", (4, 4)).cut_dim(0, [(0, 2)], "tensor")
    )
    rest, _ = split_state(
        versioned.take_snapshot(), {"model": model}, placements, lambda placement: True
    )
    assert "stride" not in str(rest.tree)
