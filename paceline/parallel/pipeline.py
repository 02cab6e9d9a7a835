"""Pipelines: consecutive layers of a model are on different workers along `stage`, and
micro-batches go through them (Huang et al. 2019).

    pipeline("tokens, blocks.*, norm, head", schedule="1f1b", micro_batches=8)

    loss = run.step(model, x, y, loss=F.cross_entropy)       forward and backward through all
                                                             stages; the loss on every worker

Each worker keeps the parameters of its stages, and pieces of no elements in the place of all
others. So optimizers, checkpoints and counts see the whole model everywhere, and the values of each
parameter once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm  # private: another name ends the import
from torch.nn.utils.spectral_norm import SpectralNorm

from paceline.comm.pairs import pairs
from paceline.errors import UsageError
from paceline.formatting import spell, unknown
from paceline.parallel.cut import CutContext
from paceline.parallel.dealing.split_measurement import SplitMeasurement
from paceline.parallel.dealing.stages import StageDealer
from paceline.parallel.following.graph import follow_layers
from paceline.parallel.pipelining.batches import Loss, refuse_class
from paceline.parallel.pipelining.chain import LayerGraph, own_parameters, trace_layers
from paceline.parallel.pipelining.model import PipelinedModel, PipelineTerms, StageSplit
from paceline.parallel.pipelining.profiler import PipelineProfiler
from paceline.parallel.pipelining.schedule import PipelineSchedule
from paceline.parallel.pipelining.schedules import ScheduleName, check, make_schedule
from paceline.parallel.pipelining.split import (
    LayerCost,
    SplitProblem,
    best_split,
    check_split,
    fastest_slowest,
)
from paceline.parallel.pipelining.split_table import describe_split
from paceline.parallel.pipelining.tracing import Untraceable
from paceline.removed import removed

Split = Literal["even", "auto"]
PER_WORKER = 4  # micro-batches for each worker along `stage`, where the script doesn't say


@removed(
    again=(
        "the split stays the one that split='auto' has found at run.prepare; "
        "start again to have it measured again"
    )
)
@dataclass(frozen=True)
class pipeline:
    """Put consecutive layers on different workers, along the axis `stage` of the mesh.

    >>> with pl.start(mesh="stage=2") as run:
    ...     model, optimizer, loader = run.prepare(model, optimizer, loader, cut=pl.pipeline("tokens, blocks.*, norm, head"))
    ...     for x, y in loader:
    ...         loss = run.step(model, x, y, loss=F.cross_entropy)  # forward and backward through all stages
    ...         optimizer.step()
    ...         optimizer.zero_grad()

    If the forward can't be traced, each stage runs the model's own forward, and layers of other
    stages are replaced by placeholders.

    Args:
        layers: Names and patterns of modules in the order of the forward, such as
            "tokens, blocks.*, norm, head". Default: "auto".
        schedule: "gpipe", "1f1b" (default), "interleaved", "zero-bubble" or "zbv".
        micro_batches: Number of parts of each worker's share of a batch. Default: 4 for each worker
            along `stage`.
        chunks: Number of stages on each worker, for "interleaved".
        split: Number of layers of each stage; "even" (default) for about as many parameters on each
            stage; or "auto", which measures all layers on each worker and takes the split with the
            shortest step. It needs a loader that is prepared with the model.
        trace: Whether the model's forward is traced. False calls one layer after the other.
        inputs: Arguments of the forward that a batch gives. Default: those without a default value.
        loss: Loss that `run.step` will be given, so that `split="auto"` measures it as well. That
            matters if it takes long, as over a large vocabulary.

    Raises:
        UsageError: `loss` is given without `split="auto"`. `run.prepare` raises it if the model
            can't be cut in this way.
    """  # noqa: E501

    layers: str | Sequence[str] = "auto"
    schedule: ScheduleName = "1f1b"
    micro_batches: int | None = None
    chunks: int | None = None
    split: Sequence[int] | Split = "even"
    trace: bool = True
    inputs: Sequence[str] | None = None
    loss: Loss | None = None

    __repr__ = spell

    def __post_init__(self) -> None:
        check_loss("pipeline", self.loss, self.split)

    @property
    def axis(self) -> str:
        return "stage"

    @property
    def travels(self) -> str:
        return (
            "activations go to the next stage, and their gradients come back, for each micro-batch"
        )

    def apply(self, model: nn.Module, context: CutContext) -> None:
        group = context.groups.another(self.axis)
        count = PER_WORKER * group.size if self.micro_batches is None else self.micro_batches
        chunks = check(self.schedule, group.size, count, self.chunks)
        schedule = make_schedule(self.schedule, group.size, count, self.chunks)
        if count > 1:
            _refuse_power_iterations(model)
        graph = self._find_layers(model, context)
        measurement = SplitMeasurement(graph, schedule, context)
        asked = (
            _measured(measurement, self.loss)
            if self.split == "auto" and len(graph.layers) >= schedule.stages
            else self.split
        )
        split = StageSplit(stage_bounds(model, graph, asked, schedule, chunks), schedule.placed)
        holding = StageDealer(model, graph, group, context, self.axis).deal(split)
        terms = PipelineTerms(
            self.schedule, count, self.chunks, pads=context.mesh.extent("shard") > 1
        )
        device = _device(model, context.device)
        _wake_autograd(device)
        messages = pairs(group, device=device)
        context.groups.count(self.axis, messages)
        profiler = PipelineProfiler(context.groups.meter(self.axis), context.record)
        made = PipelinedModel(
            model,
            graph,
            holding,
            terms,
            group=group,
            pairs=messages,
            trained=context.known,
            profiler=profiler,
        )
        context.pipelines.append((model, made))
        context.endings.append(made.close)

    def _find_layers(self, model: nn.Module, context: CutContext) -> LayerGraph:
        try:
            return trace_layers(model, self.layers, trace=self.trace, inputs=self.inputs)
        except Untraceable as error:
            graph = follow_layers(model, self.layers)
            beside = (
                f"; in no layer, and so on all stages, are {', '.join(graph.beside)}"
                if graph.beside
                else ""
            )
            context.announce(
                f"each stage runs the forward of {type(model).__name__} itself, as "
                f"{error.reason}{beside}"
            )
            return graph


def _refuse_power_iterations(model: nn.Module) -> None:
    """Raise `UsageError` for weights whose estimate moves on in each forward: it would once for
    each micro-batch.
    """
    for name, module in model.named_modules():
        if isinstance(module, _SpectralNorm) or any(
            isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values()
        ):
            raise UsageError(
                f"the spectral_norm of {name.partition('.parametrizations')[0]} steps its power "
                "iteration in "
                "each forward, so once for each micro-batch: say micro_batches=1, or leave it out"
            )


def check_loss(cut: str, loss: Loss | None, split: Sequence[int] | str) -> None:
    """Raise `UsageError` for a loss that nothing would measure, or that is none."""
    refuse_class(cut, loss)
    if loss is not None and (split != "auto" or not callable(loss)):
        raise UsageError(
            f"{cut}(loss=...) is a function of the output and the target, which split='auto' "
            f"measures: say {cut}(split='auto', "
            "loss=F.cross_entropy), or leave it out"
        )


def _measured(measurement: SplitMeasurement, loss: Loss | None) -> list[int]:
    """Find the split by which the schedule takes least. Collective, for all workers."""
    problem = measurement.problem(loss)
    counts = best_split(problem)
    without = "" if loss is not None else " (without the loss, which loss=... has it count)"
    measurement.context.announce(
        f"the split that was measured, {counts}{without}:\n{describe_split(problem, counts)}"
    )
    return counts


def stage_bounds(
    model: nn.Module,
    graph: LayerGraph,
    asked: Sequence[int] | str,
    schedule: PipelineSchedule,
    chunks: int,
) -> tuple[int, ...]:
    """Return the first layer of each stage, and the end."""
    layers, stages = len(graph.layers), schedule.stages
    if layers < stages:
        raise UsageError(
            f"pipeline(): {stages} stages ({chunks} on each worker) for {layers} layers "
            f"({', '.join(graph.layers[:6])}...): each stage "
            "needs one at least; name smaller layers, or give `stage` fewer workers"
        )
    if not isinstance(asked, str):
        counts = check_split(asked, graph.layers, stages)
    elif asked == "even":
        sizes = [
            LayerCost(name, float(_numel(model, graph, at)), 0.0)
            for at, name in enumerate(graph.layers)
        ]
        # without a memory there is one
        counts = fastest_slowest(SplitProblem(sizes, schedule, [1.0] * schedule.ranks)) or []
    else:
        raise UsageError(
            f"{unknown('split', asked, Split)}; or the layers of each stage, split=[3, 4, 4, 1]"
        )
    return (0, *accumulate(counts))


def _numel(model: nn.Module, graph: LayerGraph, layer: int) -> int:
    return sum(
        parameter.numel() for parameter in own_parameters(model, graph.part(layer, layer + 1))
    )


def _wake_autograd(device: torch.device) -> None:
    """Have autograd's own thread for a GPU run a kernel: torch warns where its first is a matrix
    product, as that of a stage is.
    """
    if device.type == "cuda":
        x = torch.ones(1, device=device, requires_grad=True)
        torch.autograd.grad((x * x).sum(), x)


def _device(model: nn.Module, default: torch.device) -> torch.device:
    """Return where a model is; `default`, for one without memory."""
    return next(
        (parameter.device for parameter in model.parameters() if not parameter.is_meta), default
    )
