"""Small cuts of tests' own: a linear layer cut by columns along `tensor`, and gradients that are
summed along `shard`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn import functional as F

from paceline.comm.group_protocol import Group
from paceline.formatting import format_as_call
from paceline.parallel.cut import CutContext, GradientSink


class _Enter(torch.autograd.Function):
    """The input of a cut layer: whole on all workers, and so is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.group.all_reduce(
            grads[0].contiguous(), name="gradient of the input"
        ).wait(), None


class _Leave(torch.autograd.Function):
    """The outputs of all workers side by side."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: Group) -> Tensor:
        ctx.group = group
        parts = group.all_gather(y.movedim(-1, 0).contiguous(), name="outputs").wait()
        return torch.cat(parts).movedim(0, -1).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].chunk(ctx.group.size, -1)[ctx.group.rank].contiguous(), None


class ColumnsOfLinear(nn.Module):
    """This worker's columns of a linear layer, whose outputs are whole."""

    def __init__(self, weight: Tensor, bias: Tensor, group: Group) -> None:
        super().__init__()
        self.weight, self.bias, self.group = Parameter(weight), Parameter(bias), group

    def forward(self, x: Tensor) -> Tensor:
        whole: Tensor = _Leave.apply(
            F.linear(_Enter.apply(x, self.group), self.weight, self.bias), self.group
        )
        return whole


@dataclass(frozen=True)
class columns:
    """Cut the linear layer `name` of a Sequential by columns along `tensor`."""

    name: str = "0"
    axis: str = "tensor"
    travels: ClassVar[str] = "activations"

    __repr__ = format_as_call

    def apply(self, model: nn.Module, context: CutContext) -> None:
        group, whole = context.groups.group_along(self.axis), model.get_submodule(self.name)
        length = whole.weight.shape[0] // group.size
        rows = [(group.rank * length, (group.rank + 1) * length)]
        found = {
            key: context.placements.placement_of(parameter).cut_dim(0, rows, self.axis)
            for key, parameter in whole.named_parameters()
        }
        cut = ColumnsOfLinear(
            *(found[key].copy_part(getattr(whole, key).detach()) for key in ("weight", "bias")),
            group,
        )
        for key, placement in found.items():
            context.replace_parameter(getattr(whole, key), getattr(cut, key), placement)
        setattr(model, self.name, cut)


class _Weights:
    """A source that delivers nothing, and knows what gradients count."""

    nbytes = kept_nbytes = 0

    def __init__(self) -> None:
        self.sink: GradientSink | None = None

    def deliver_to(self, sink: GradientSink) -> None:
        self.sink = sink

    def gather(self, parameters: Sequence[Tensor]) -> None: ...

    def end_pass(self) -> None: ...

    def abort_pass(self) -> None: ...


@dataclass(frozen=True)
class summed:
    """Sum all gradients along `shard` before anything else sees them: what strategies get is
    what a sharded model would give them.
    """

    axis: str = "shard"
    travels: ClassVar[str] = "gradients"

    __repr__ = format_as_call

    def apply(self, model: nn.Module, context: CutContext) -> None:
        group, weights = context.groups.group_along(self.axis), _Weights()
        context.gradient_sources.append(weights)

        def add_up(grad: Tensor) -> Tensor:
            assert weights.sink is not None
            scale = weights.sink.pass_weight()  # above 0: these tests have no ghosts
            return group.all_reduce((grad * scale).contiguous(), name="gradient").wait() / scale

        for parameter in model.parameters():
            parameter.register_hook(add_up)


def network() -> nn.Sequential:
    """Make two linear layers whose values are the same in every call, whatever else draws."""
    numbers = torch.Generator().manual_seed(5)
    made = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=numbers, dtype=parameter.dtype) / 3
            )
    return made
