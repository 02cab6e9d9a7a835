"""What a cut of a model is: it gives each worker along one axis of the mesh its part of layers, or
of what is kept of them.

A script writes cuts as plain data, `run.prepare(model, optimizer, loader, cut=[tensor({...}),
shard("blocks.*")])`, and they are applied to the model in that order, before anything else looks at
its parameters. What has been cut is an ordinary model with other parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from paceline.cluster.mesh import Mesh
from paceline.comm.axes import AxisGroups
from paceline.parallel.meta import CPU
from paceline.parallel.placement import Placement, Placements

if TYPE_CHECKING:
    from paceline.parallel.pipelining.model import PipelinedModel


class GradientSink(Protocol):
    """Whatever takes the gradients of parameters that are cut, summed over the workers that have
    parts of them.
    """

    @property
    def replicas_diverge(self) -> bool:
        """Whether parameters may change otherwise than by steps of optimizers."""
        ...

    def weigh(self) -> float:
        """Return what this worker's gradients count in the pass under way, which begins with the
        first of them.
        """
        ...

    def take(self, parameter: Parameter, grad: Tensor) -> None:
        """Take the gradient of a part, which counts as it is."""
        ...


class CutGradients(Protocol):
    """The gradients of parameters of which workers have parts.

    Every worker ends every backward pass.
    """

    @property
    def nbytes(self) -> int:
        """The bytes of memory that it takes at this moment, beside the gradients that optimizers
        step by.
        """
        ...

    @property
    def kept_nbytes(self) -> int:
        """The bytes of memory that is kept from pass to pass, beside the gradients that
        optimizers step by.
        """
        ...

    def deliver_to(self, sink: GradientSink) -> None:
        """Hand gradients to `sink` from now on."""
        ...

    def gather(self, parameters: Sequence[Tensor]) -> None:
        """Make these parameters whole, and what goes with them, for a backward through their
        layers. Collective.
        """
        ...

    def end_pass(self) -> None:
        """Deliver what is left of a backward pass. Collective."""
        ...

    def abort_pass(self) -> None:
        """Forget a pass that has failed."""
        ...


@dataclass
class CutContext:
    """Everything that a cut works with: the mesh and its groups, and where each parameter is so
    far.
    """

    mesh: Mesh
    groups: AxisGroups
    placements: Placements  # a parameter that none is noted of is whole
    device: torch.device = CPU  # on which parameters without memory come to lie
    # what optimizers step in the place of each parameter
    renewed: dict[Parameter, Parameter] = field(default_factory=dict)
    # gradients that autograd doesn't add to the parameters that are stepped
    sources: list[CutGradients] = field(default_factory=list)
    # what is called when the run ends
    endings: list[Callable[[], None]] = field(default_factory=list)
    # models whose layers are on several workers
    pipelines: list[tuple[nn.Module, PipelinedModel]] = field(default_factory=list)
    # what is called when the parts of all cuts have their values
    valued: list[Callable[[], None]] = field(default_factory=list)
    # what other workers have as well, along an axis that it is cut along
    tied: list[Parameter] = field(default_factory=list)
    # each makes whole parameters what their pieces are; collective
    followers: list[Callable[[], None]] = field(default_factory=list)
    # what is trained in the place of a parameter, after all cuts
    known: Callable[[Parameter], Parameter] = lambda parameter: parameter
    # inputs and target, of one in so many parts of a global batch
    sample: Callable[[int], tuple[Any, ...]] = lambda parts: ()
    announce: Callable[[str], None] = print  # on the first worker
    # of the trace: what was done from when to when (nanoseconds)
    record: Callable[[str, int, int], None] = lambda what, began, ended: None

    def renew(self, old: Parameter, new: Parameter, placement: Placement) -> None:
        """Have optimizers step `new`, which holds what `placement` says, in the place of `old`."""
        self.placements.move(old, new, placement)
        self.renewed[old] = new


class ModelCut(Protocol):
    """A cut along one `axis` of the mesh, as it is written."""

    @property
    def axis(self) -> str:
        """The axis along which workers hold different parts; none ("") where each has all of
        them.
        """
        ...

    @property
    def travels(self) -> str:
        """What workers along the axis send each other, and when, in words."""
        ...

    def apply(self, model: nn.Module, context: CutContext) -> None:
        """Leave this worker its part of a model, and tell `context` of each parameter that is
        another one now. Collective.

        Raises `UsageError` where the model can't be cut so.
        """
        ...
