"""What a cut of a model is: it gives each worker along one axis of the mesh its part of layers, or of what is kept of them.

A script writes cuts as plain data, `run.prepare(model, optimizer, loader, cut=[tensor({...}), shard("blocks.*")])`, and they are applied to
the model in that order, before anything else looks at its parameters. What has been cut is an ordinary model with other parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import nn
from torch.nn import Parameter

from paceline.cluster.mesh import Mesh
from paceline.comm.axes import AxisGroups
from paceline.parallel.placement import Placement, Placements


class BatchWeight(Protocol):
    """What this worker's part of a batch counts. `scale`: its gradient in the mean; `ghost`: it has no samples, and counts as zeros."""

    scale: float
    ghost: bool


@dataclass
class CutContext:
    """Everything that a cut works with: the mesh and its groups, what a batch counts, and where each parameter is so far."""

    mesh: Mesh
    groups: AxisGroups
    step_state: BatchWeight
    placements: Placements  # a parameter that none is noted of is whole
    seed: int = 0
    announce: Callable[[str], None] = print
    renewed: dict[Parameter, Parameter] = field(default_factory=dict)  # what optimizers step in the place of each parameter

    def renew(self, old: Parameter, new: Parameter, placement: Placement) -> None:
        """Have optimizers step `new`, which holds what `placement` says, in the place of `old`."""
        self.placements.move(old, new, placement)
        self.renewed[old] = new


class ModelCut(Protocol):
    """A cut along one `axis` of the mesh, as it is written."""

    @property
    def axis(self) -> str:
        """The axis along which workers hold different parts."""
        ...

    def apply(self, model: nn.Module, context: CutContext) -> None:
        """Leave this worker its part of a model, and tell `context` of each parameter that is another one now. Collective.

        Raises `UsageError` where the model can't be cut so.
        """
        ...
