"""A cut tells where parameters are, and which ones optimizers step in the place of which."""

from __future__ import annotations

import torch
from torch import nn

from paceline.cluster.mesh import Mesh
from paceline.comm.axis_groups import AxisGroups
from paceline.comm.solo import SoloGroup
from paceline.parallel.cut import CutContext
from paceline.parallel.placement import Placements


def test_a_renewed_parameter_takes_the_place_of_the_old_one() -> None:
    mesh = Mesh((("tensor", 1),), (0,))
    context = CutContext(mesh, AxisGroups(mesh, SoloGroup()), Placements())
    old, new = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(2, 2))
    context.placements.add_placement(old, context.placements.placement_of(old, "weight"))
    context.replace_parameter(
        old, new, context.placements.placement_of(old).cut_dim(0, [(2, 4)], "tensor")
    )
    assert context.replacements == {old: new}
    assert [
        (found is new, placement.name, placement.axes)
        for found, placement in context.placements.parameters()
    ] == [(True, "weight", ("tensor",))]
