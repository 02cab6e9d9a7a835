"""Tensor parallelism as a script writes it: how each named module is cut along the axis `tensor`.

    tensor({"blocks.*.attention.qkv": column(parts=3), "blocks.*.attention.out": row(),
            "blocks.*.up": column(), "blocks.*.down": row(),
            "tokens": vocab(), "head": vocab()},
           divide=["blocks.*.attention.heads"])

Each pair of column() and row() sums activations once in forward and once in backward. With
`"blocks": sequence()`, each worker has a piece of the sequence inside of `blocks`, and a sum
becomes two halves: a reduce-scatter and an all-gather.

A cut layer has ordinary parameters of the local shape, in the same objects as before. So
optimizers, strategies and codecs treat it as any other. After Shoeybi et al., "Megatron-LM" (2019),
and Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from paceline.errors import UsageError
from paceline.formatting import format_as_call
from paceline.parallel.cut import CutContext
from paceline.parallel.tensor import application, plans
from paceline.parallel.tensor.styles import Style


@dataclass(frozen=True)
class tensor:
    """Divide layers between the workers along `tensor`, which have the same samples.

    >>> with pl.start(mesh="data=2, tensor=2") as run:
    ...     cut = pl.tensor({"blocks.*.up": pl.column(), "blocks.*.down": pl.row()})
    ...     model, optimizer, loader = run.prepare(model, optimizer, loader, cut=cut)

    Args:
        layers: Mapping from patterns of module names (`*` is any text) to `column()`, `row()`,
            `vocab()`, `sequence()` or `summed()`. Or "auto": the plan in `tensor_plan` of the
            model's class, or the plan of a model of transformers.
        divide: Patterns of integer attributes of modules, such as numbers of heads, that are
            divided by the number of workers. Default: none.
        compare: Whether the output of each module with a pair of divided layers is compared with
            its undivided output, in its first call. Default: True.

    Raises:
        UsageError: `layers` or `divide` is something else. `run.prepare` raises it if a layer can't
            be divided.
    """

    __repr__ = format_as_call

    layers: Mapping[str, Style] | Literal["auto"]
    divide: Sequence[str] = ()
    compare: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        if self.layers != "auto" and (not isinstance(self.layers, Mapping) or not self.layers):
            raise UsageError(
                f"tensor({self.layers!r}) names no layers with styles; "
                'give {"blocks.*.up": column(), ...}, or "auto" for a model with a plan'
            )
        if isinstance(self.divide, str):
            raise UsageError(
                f"divide={self.divide!r} is a string; give a list, divide=[{self.divide!r}]"
            )
        for pattern, style in self.layers.items() if isinstance(self.layers, Mapping) else ():
            if not isinstance(style, Style):
                raise UsageError(
                    f"tensor: {pattern!r} has {style!r}; give column(), row(), "
                    "vocab(), sequence() or summed()"
                )

    @property
    def axis(self) -> str:
        return "tensor"

    @property
    def travels(self) -> str:
        return (
            "activations are summed after each pair of column() and row(), forward and backward; "
            "no parameters travel"
        )

    def apply(self, model: nn.Module, context: CutContext) -> None:
        layers, divide = self.layers, list(self.divide)
        if isinstance(layers, str):
            layers, plan_divide = plans.find_plan(model, context.mesh.axis_size(self.axis))
            divide = [*plan_divide, *(pattern for pattern in divide if pattern not in plan_divide)]
        application.cut_layers(model, layers, divide, context, compare=self.compare)
