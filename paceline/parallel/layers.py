"""Layer-wise parallelism: consecutive layers are on different workers, without micro-batches.

    layers("auto")                   pipeline("auto", schedule="gpipe", micro_batches=1)
    layers("auto", devices=[...])    over devices of one worker, in any training loop

Workers wait while the batch is elsewhere. So this is for models that are too large for one worker,
and `pipeline` is for speed as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.formatting import format_as_call
from paceline.parallel.cut import CutContext
from paceline.parallel.dealing.devices import DeviceLayers, spread_layers
from paceline.parallel.pipeline import Split, check_split_loss, pipeline
from paceline.parallel.pipelining.batches import Loss
from paceline.removed import declare_removed_options


@declare_removed_options(
    again=(
        "the split stays the one that split='auto' has found at run.prepare; "
        "start again to have it measured again"
    )
)
@dataclass(frozen=True)
class layers:
    """Cut a model between layers, along the axis `stage` of the mesh, without micro-batches.

    >>> with pl.start() as run:  # one worker with two devices
    ...     cut = pl.layers(devices=["cuda:0", "cuda:1"])
    ...     model, optimizer, loader = run.prepare(model, optimizer, loader, cut=cut)

    Args:
        names: Names and patterns of modules in the order of the forward. Default: "auto".
        split: Number of layers of each stage, "even" (default) or "auto", as in `pipeline`.
        trace: Whether the model's forward is traced, as in `pipeline`. Default: True.
        inputs: Arguments of the forward that a batch gives. Default: those without a default value.
        loss: Loss that `run.step` will be given, for `split="auto"`. Default: none is measured.
        devices: Cut the model over these devices of each worker, not over workers. The mesh then
            has no axis `stage`, and a loop of `model(x)` and `loss.backward()` stays as it is.
            Outputs come back to the device of the inputs. Data-parallel workers each need devices
            of their own.

    Raises:
        UsageError: `loss` without `split="auto"`, or fewer than two devices.
    """

    names: str | Sequence[str] = "auto"
    split: Sequence[int] | Split = "even"
    trace: bool = True
    inputs: Sequence[str] | None = None
    loss: Loss | None = None
    devices: Sequence[str | torch.device] | None = None

    __repr__ = format_as_call

    def __post_init__(self) -> None:
        check_split_loss("layers", self.loss, self.split)
        if self.devices is not None and (
            isinstance(self.devices, str | torch.device) or len(self.devices) < 2
        ):
            raise UsageError(
                f"layers(devices={self.devices!r}) has to name two devices at least: "
                'devices=["cuda:0", "cuda:1"]'
            )

    @property
    def axis(self) -> str:
        return "" if self.devices is not None else "stage"

    @property
    def travels(self) -> str:
        if self.devices is not None:
            return (
                "activations go to the next device of the worker, and their gradients come back; "
                "nothing to other workers"
            )
        return "activations go to the next stage, and their gradients come back, once a batch"

    def apply(self, model: nn.Module, context: CutContext) -> None:
        if self.devices is not None:
            spread_layers(
                model,
                DeviceLayers(
                    self.names, self.devices, self.split, self.trace, self.inputs, self.loss
                ),
                context,
            )
            return
        cut = pipeline(
            self.names,
            "gpipe",
            micro_batches=1,
            split=self.split,
            trace=self.trace,
            inputs=self.inputs,
            loss=self.loss,
        )
        cut.apply(model, context)
