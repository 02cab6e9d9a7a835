"""What all cuts have in common: each worker along one axis of the mesh gets a part of a model.

A script lists cuts as plain data, `run.prepare(model, cut=[tensor({...}), shard("blocks.*")])`.
They are applied in that order, before anything else looks at the model's parameters. A model that
has been cut is an ordinary model with other parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from paceline.cluster.mesh import Mesh
from paceline.comm.axis_groups import AxisGroups
from paceline.parallel.meta import CPU
from paceline.parallel.placement import Placement, Placements

if TYPE_CHECKING:
    from paceline.parallel.pipelining.pipelined_model import PipelinedModel


class GradientSink(Protocol):
    """Takes gradients of cut parameters, summed over the workers that have parts of them."""

    @property
    def replicas_diverge(self) -> bool:
        """Whether parameters may change otherwise than by steps of optimizers."""
        ...

    def pass_weight(self) -> float:
        """Factor of this worker's gradients in this pass; the pass begins with the first call."""
        ...

    def take_cut_gradient(self, parameter: Parameter, grad: Tensor) -> None:
        """Take the gradient of a part, which is weighted already."""
        ...


class CutGradients(Protocol):
    """Gradients of parameters that are divided between workers. Every worker ends every pass."""

    @property
    def nbytes(self) -> int:
        """Bytes in use at this moment, without the gradients that optimizers step by."""
        ...

    @property
    def kept_nbytes(self) -> int:
        """Bytes kept from pass to pass, without the gradients that optimizers step by."""
        ...

    def deliver_to(self, sink: GradientSink) -> None:
        """Hand gradients to `sink` from now on."""
        ...

    def gather(self, parameters: Sequence[Tensor]) -> None:
        """Make these parameters whole, and their units, for a backward through them. Collective."""
        ...

    def end_pass(self) -> None:
        """Deliver all gradients of the pass that are still here. Collective."""
        ...

    def abort_pass(self) -> None:
        """Forget a pass that has failed."""
        ...


@dataclass
class CutContext:
    """Everything that a cut works with, and what cuts leave behind for those after them.

    Fields up to `device` are given to a cut. Cuts fill in `replacements` and all that follow up to
    `refresh_callbacks`. The last fields are functions of the run.
    """

    mesh: Mesh
    groups: AxisGroups
    # Where each parameter is so far; one that isn't noted there is whole.
    placements: Placements
    # Where parameters without memory get their memory.
    device: torch.device = CPU
    # By a model's parameter: the one that optimizers step in its place.
    replacements: dict[Parameter, Parameter] = field(default_factory=dict)
    # Gradients that autograd doesn't add to the stepped parameters themselves.
    gradient_sources: list[CutGradients] = field(default_factory=list)
    # Called when the run ends.
    close_callbacks: list[Callable[[], None]] = field(default_factory=list)
    # Models whose layers are on several workers.
    pipelines: list[tuple[nn.Module, PipelinedModel]] = field(default_factory=list)
    # Called once the parts of all cuts have their values.
    value_callbacks: list[Callable[[], None]] = field(default_factory=list)
    # Parameters that other workers hold as well, although they are along an axis of a cut.
    tied: list[Parameter] = field(default_factory=list)
    # Each sets whole parameters to the values of their pieces. Collective.
    refresh_callbacks: list[Callable[[], None]] = field(default_factory=list)
    # Finds the parameter that is trained in the place of another one, after all cuts.
    find_trained: Callable[[Parameter], Parameter] = lambda parameter: parameter
    # Makes inputs and target in the size of one of this number of equal parts of a global batch.
    make_sample: Callable[[int], tuple[Any, ...]] = lambda parts: ()
    # Prints a line on the first worker.
    announce: Callable[[str], None] = print
    # Adds a span to the trace: its name, begin and end in nanoseconds.
    record_span: Callable[[str, int, int], None] = lambda what, began, ended: None

    def replace_parameter(self, old: Parameter, new: Parameter, placement: Placement) -> None:
        """Let optimizers step `new` in the place of `old`; `placement` says what `new` holds."""
        self.placements.replace_tensor(old, new, placement)
        self.replacements[old] = new


class ModelCut(Protocol):
    """A cut along one `axis` of the mesh, as it is written."""

    @property
    def axis(self) -> str:
        """The axis along which workers hold different parts; "" if each has all of them."""
        ...

    @property
    def travels(self) -> str:
        """What workers along the axis send each other, and when, in words for the user."""
        ...

    def apply(self, model: nn.Module, context: CutContext) -> None:
        """Leave this worker its part of a model. Collective.

        Every parameter that is replaced is noted in `context`. Raises `UsageError` if the model
        can't be cut in this way.
        """
        ...
