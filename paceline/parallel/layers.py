"""Layer-wise parallelism: consecutive layers of a model are on different workers, and each batch goes through them as one.

    layers("auto")        is pipeline("auto", schedule="gpipe", micro_batches=1)

Workers wait while the batch is elsewhere: this is for models that are too large for one worker; `pipeline` is for speed, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from paceline.formatting import spell
from paceline.parallel.cut import CutContext
from paceline.parallel.pipeline import check_loss, pipeline
from paceline.parallel.pipelining.batches import Loss


@dataclass(frozen=True)
class layers:
    """Cut a model between layers, along the axis `stage` of the mesh, without micro-batches.

    `names`, `split`, `trace`, `inputs` and `loss`: as the `layers`, `split`, `trace`, `inputs` and `loss` of `pipeline`.
    """

    names: str | Sequence[str] = "auto"
    split: Sequence[int] | Literal["even", "auto"] = "even"
    trace: bool = True
    inputs: Sequence[str] | None = None
    loss: Loss | None = None
    axis: ClassVar[str] = "stage"

    __repr__ = spell

    def __post_init__(self) -> None:
        check_loss("layers", self.loss, self.split)

    @property
    def travels(self) -> str:
        return "activations go to the next stage, and their gradients come back, once a batch"

    def apply(self, model: nn.Module, context: CutContext) -> None:
        cut = pipeline(self.names, "gpipe", micro_batches=1, split=self.split, trace=self.trace, inputs=self.inputs, loss=self.loss)
        cut.apply(model, context)
