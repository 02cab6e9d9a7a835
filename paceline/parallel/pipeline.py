"""Pipelines (Huang et al. 2019): layers on workers along `stage`, passed by micro-batches.

    pipeline("tokens, blocks.*, norm, head", schedule="1f1b", micro_batches=8)

    loss = run.step(model, x, y, loss=F.cross_entropy)    forward and backward through all stages;
                                                          the loss comes out on every worker

Each worker holds the parameters of its stages. All others are pieces without elements there. So
optimizers, checkpoints and counts see the whole model everywhere, and each value exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import nn

# Private: if it is renamed, this import fails.
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from paceline.comm.pairs import connect_pairs
from paceline.errors import UsageError
from paceline.formatting import describe_unknown_choice, format_as_call
from paceline.parallel.cut import CutContext
from paceline.parallel.dealing.split_measurement import SplitMeasurement
from paceline.parallel.dealing.stages import StageDealer
from paceline.parallel.following.followed_graph import follow_layers
from paceline.parallel.pipelining.batches import Loss, refuse_loss_class
from paceline.parallel.pipelining.layer_graph import LayerGraph, list_part_parameters, trace_layers
from paceline.parallel.pipelining.pipelined_model import PipelinedModel, PipelineTerms, StageSplit
from paceline.parallel.pipelining.profiler import PipelineProfiler
from paceline.parallel.pipelining.schedule import PipelineSchedule
from paceline.parallel.pipelining.schedules import ScheduleName, check_schedule, make_schedule
from paceline.parallel.pipelining.split import (
    LayerCost,
    SplitProblem,
    check_split,
    find_best_split,
    minimise_slowest_stage,
)
from paceline.parallel.pipelining.split_table import describe_split
from paceline.parallel.pipelining.tracing import Untraceable
from paceline.removed import declare_removed_options

Split = Literal["even", "auto"]
# Default number of micro-batches for each worker along `stage`.
MICRO_BATCHES_PER_WORKER = 4


@declare_removed_options(
    again=(
        "the split stays the one that split='auto' has found at run.prepare; "
        "start again to have it measured again"
    )
)
@dataclass(frozen=True)
class pipeline:
    """Put consecutive layers on different workers, along the axis `stage` of the mesh.

    >>> with pl.start(mesh="stage=2") as run:
    ...     cut = pl.pipeline("tokens, blocks.*, norm, head")
    ...     model, optimizer, loader = run.prepare(model, optimizer, loader, cut=cut)
    ...     for x, y in loader:
    ...         loss = run.step(model, x, y, loss=F.cross_entropy)  # through all stages and back
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
    """

    layers: str | Sequence[str] = "auto"
    schedule: ScheduleName = "1f1b"
    micro_batches: int | None = None
    chunks: int | None = None
    split: Sequence[int] | Split = "even"
    trace: bool = True
    inputs: Sequence[str] | None = None
    loss: Loss | None = None

    __repr__ = format_as_call

    def __post_init__(self) -> None:
        check_split_loss("pipeline", self.loss, self.split)

    @property
    def axis(self) -> str:
        return "stage"

    @property
    def travels(self) -> str:
        return (
            "activations go to the next stage, and their gradients come back, for each micro-batch"
        )

    def apply(self, model: nn.Module, context: CutContext) -> None:
        # Groups and connections of its own: other traffic along the axis must not come in between.
        group = context.groups.make_another_group(self.axis)
        count = (
            MICRO_BATCHES_PER_WORKER * group.size
            if self.micro_batches is None
            else self.micro_batches
        )
        chunks = check_schedule(self.schedule, group.size, count, self.chunks)
        schedule = make_schedule(self.schedule, group.size, count, self.chunks)
        if count > 1:
            _refuse_power_iterations(model)
        graph = self._find_layers(model, context)
        measurement = SplitMeasurement(graph, schedule, context)
        # The split has to be measured before layers are dealt, while the whole model is still here.
        requested = (
            _measure_split(measurement, self.loss)
            if self.split == "auto" and len(graph.layers) >= schedule.stages
            else self.split
        )
        split = StageSplit(
            find_stage_bounds(model, graph, requested, schedule, chunks), schedule.placed
        )
        holding = StageDealer(model, graph, group, context, self.axis).deal_parameters(split)
        # Along `shard`, workers gather layers in each micro-batch, so all need equally many of
        # them.
        terms = PipelineTerms(
            self.schedule, count, self.chunks, pads=context.mesh.axis_size("shard") > 1
        )
        device = _model_device(model, context.device)
        _warm_up_autograd(device)
        messages = connect_pairs(group, device=device)
        context.groups.count_messages(self.axis, messages)
        profiler = PipelineProfiler(context.groups.meter_along(self.axis), context.record_span)
        pipelined = PipelinedModel(
            model,
            graph,
            holding,
            terms,
            group=group,
            pairs=messages,
            trained=context.find_trained,
            profiler=profiler,
        )
        context.pipelines.append((model, pipelined))
        context.close_callbacks.append(pipelined.close)

    def _find_layers(self, model: nn.Module, context: CutContext) -> LayerGraph:
        try:
            return trace_layers(model, self.layers, trace=self.trace, inputs=self.inputs)
        except Untraceable as error:
            graph = follow_layers(model, self.layers)
            beside = (
                f"; in no layer, and so on all stages, are {', '.join(graph.outside_parameters)}"
                if graph.outside_parameters
                else ""
            )
            context.announce(
                f"each stage runs the forward of {type(model).__name__} itself, as "
                f"{error.reason}{beside}"
            )
            return graph


def _refuse_power_iterations(model: nn.Module) -> None:
    """Raise `UsageError` for spectral norms: their estimate would move on once per micro-batch."""
    for name, module in model.named_modules():
        if isinstance(module, _SpectralNorm) or any(
            isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values()
        ):
            raise UsageError(
                f"the spectral_norm of {name.partition('.parametrizations')[0]} steps its power "
                "iteration in "
                "each forward, so once for each micro-batch: say micro_batches=1, or leave it out"
            )


def check_split_loss(cut: str, loss: Loss | None, split: Sequence[int] | str) -> None:
    """Raise `UsageError` for a loss that isn't a function, or that nothing would measure."""
    refuse_loss_class(cut, loss)
    if loss is not None and (split != "auto" or not callable(loss)):
        raise UsageError(
            f"{cut}(loss=...) is a function of the output and the target, which split='auto' "
            f"measures: say {cut}(split='auto', loss=F.cross_entropy), or leave it out"
        )


def _measure_split(measurement: SplitMeasurement, loss: Loss | None) -> list[int]:
    """Find the split with which the schedule takes least time. Collective, for all workers."""
    problem = measurement.measure_problem(loss)
    counts = find_best_split(problem)
    without = "" if loss is not None else " (without the loss, which loss=... has it count)"
    measurement.context.announce(
        f"the split that was measured, {counts}{without}:\n{describe_split(problem, counts)}"
    )
    return counts


def find_stage_bounds(
    model: nn.Module,
    graph: LayerGraph,
    requested: Sequence[int] | str,
    schedule: PipelineSchedule,
    chunks: int,
) -> tuple[int, ...]:
    """List the first layer of each stage, and then the number of layers."""
    layers, stages = len(graph.layers), schedule.stages
    if layers < stages:
        raise UsageError(
            f"pipeline(): {stages} stages ({chunks} on each worker) for {layers} layers "
            f"({', '.join(graph.layers[:6])}...): each stage "
            "needs one at least; name smaller layers, or give `stage` fewer workers"
        )
    if not isinstance(requested, str):
        counts = check_split(requested, graph.layers, stages)
    elif requested == "even":
        # With costs of numels alone, and no memory limits, there always is a split.
        sizes = [
            LayerCost(name, float(_count_elements(model, graph, at)), 0.0)
            for at, name in enumerate(graph.layers)
        ]
        counts = minimise_slowest_stage(SplitProblem(sizes, schedule, [1.0] * schedule.ranks)) or []
    else:
        raise UsageError(
            f"{describe_unknown_choice('split', requested, Split)}; or the layers of each stage, "
            "split=[3, 4, 4, 1]"
        )
    return (0, *accumulate(counts))


def _count_elements(model: nn.Module, graph: LayerGraph, layer: int) -> int:
    return sum(
        parameter.numel()
        for parameter in list_part_parameters(model, graph.make_part(layer, layer + 1))
    )


def _warm_up_autograd(device: torch.device) -> None:
    """Let autograd's thread for a GPU run a small kernel first.

    torch warns if the first kernel of that thread is a matrix product, as it would be for a stage.
    """
    if device.type == "cuda":
        x = torch.ones(1, device=device, requires_grad=True)
        torch.autograd.grad((x * x).sum(), x)


def _model_device(model: nn.Module, default: torch.device) -> torch.device:
    """The device of a model; `default` for a model without memory."""
    return next(
        (parameter.device for parameter in model.parameters() if not parameter.is_meta), default
    )
