"""Pipelines: consecutive layers of a model are on different workers along `stage`, and micro-batches go through them (Huang et al. 2019).

    pipeline("tokens, blocks.*, norm, head", schedule="1f1b", micro_batches=8)

    loss = run.step(model, x, y, loss=F.cross_entropy)       forward and backward through all stages; the loss on every worker

Each worker keeps the parameters of its stages, and pieces of no elements in the place of all others. So optimizers, checkpoints and counts
see the whole model everywhere, and the values of each parameter once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._pytree import tree_map_only

from paceline.comm.pairs import pairs
from paceline.errors import UsageError
from paceline.formatting import spell
from paceline.parallel.cut import CutContext
from paceline.parallel.pipelining.auto_split import agree_problem
from paceline.parallel.pipelining.batches import Loss, one_number
from paceline.parallel.pipelining.chain import LayerGraph, own_parameters, trace_layers
from paceline.parallel.pipelining.measuring import count_layers, measure_layers
from paceline.parallel.pipelining.model import PipelinedModel, PipelineTerms, SharedParameter, StageSplit
from paceline.parallel.pipelining.profiler import PipelineProfiler
from paceline.parallel.pipelining.schedule import PipelineSchedule
from paceline.parallel.pipelining.schedules import check, make_schedule
from paceline.parallel.pipelining.split import LayerCost, SplitProblem, best_split, check_split, fastest_slowest
from paceline.parallel.pipelining.split_table import describe_split

PER_WORKER = 4  # micro-batches for each worker along `stage`, where the script doesn't say


@dataclass(frozen=True)
class pipeline:
    """Cut a model between layers, along the axis `stage` of the mesh.

    `layers`: names and patterns of modules in the order of the forward, "tokens, blocks.*, norm, head", or "auto". `schedule`: gpipe, 1f1b,
    interleaved, zero-bubble or zbv. `micro_batches`: how many each worker's share of a batch is cut into (default: 4 for each stage's
    worker). `chunks`: stages on each worker, for interleaved. `split`: layers of each stage, "even" for about as many parameters each, or
    "auto": each worker measures all layers on samples of the loader that is prepared with the model, and the split is that by which the
    schedule takes least, on workers of any speed.
    `trace=False` calls the layers one after the other, and not as the model's forward does. `inputs`: those arguments of the forward that a
    batch gives, where it isn't those without a default. `loss`: what run.step will be given, so that split="auto" measures it as well; it
    counts where it takes long, as over a large vocabulary.
    """

    layers: str | Sequence[str] = "auto"
    schedule: str = "1f1b"
    micro_batches: int | None = None
    chunks: int | None = None
    split: Sequence[int] | Literal["even", "auto"] = "even"
    trace: bool = True
    inputs: Sequence[str] | None = None
    loss: Loss | None = None
    axis: ClassVar[str] = "stage"

    __repr__ = spell

    def __post_init__(self) -> None:
        check_loss("pipeline", self.loss, self.split)

    @property
    def travels(self) -> str:
        return "activations go to the next stage, and their gradients come back, for each micro-batch"

    def apply(self, model: nn.Module, context: CutContext) -> None:
        group = context.groups.another(self.axis)
        count = PER_WORKER * group.size if self.micro_batches is None else self.micro_batches
        chunks = check(self.schedule, group.size, count, self.chunks)
        schedule = make_schedule(self.schedule, group.size, count, self.chunks)
        placed = schedule.placed
        graph = trace_layers(model, self.layers, trace=self.trace, inputs=self.inputs)
        asked = _measured(graph, schedule, context, self.loss) if self.split == "auto" and len(graph.layers) >= len(placed) else self.split
        split = StageSplit(stage_bounds(model, graph, asked, schedule, chunks), placed)
        users = graph.users(split.bounds[:-1])
        ties, mine, elsewhere = list[SharedParameter](), dict[str, Parameter](), dict[str, Parameter]()
        rank = context.groups.along(self.axis).rank
        for name, parameter in list(model.named_parameters()):
            stages = users[parameter]
            places, placement = sorted({placed[stage] for stage in stages}), context.placements.of(parameter, name)
            among = context.groups.part(group, places, self.axis) if len(places) > 1 else None
            if rank in places:
                context.placements.add(parameter, placement.along(self.axis, copy=places[0] != rank))
                mine[name] = parameter
                ties += [SharedParameter(parameter, among)] * (len(stages) > 1)
                context.tied.extend([parameter] * (len(places) > 1))
            else:
                empty = _empty(parameter)
                _replace(model, parameter, empty)
                context.renew(parameter, empty, placement.elsewhere(self.axis))
                elsewhere[name] = empty
        terms = PipelineTerms(self.schedule, count, self.chunks, pads=context.mesh.extent("shard") > 1)
        messages = pairs(group, device=_device(model))
        context.groups.count(self.axis, messages)
        made = PipelinedModel(
            model,
            graph,
            split,
            terms,
            group=group,
            pairs=messages,
            ties=ties,
            mine=mine,
            elsewhere=elsewhere,
            trained=context.known,
            profiler=PipelineProfiler(context.groups.meter(self.axis), context.record),
        )
        context.pipelines.append((model, made))
        context.endings.append(made.close)


def check_loss(cut: str, loss: Loss | None, split: Sequence[int] | str) -> None:
    """Raise `UsageError` for a loss that nothing would measure, or that is none."""
    if loss is not None and (split != "auto" or not callable(loss)):
        raise UsageError(
            f"{cut}(loss=...) is a function of the output and the target, which split='auto' measures: say {cut}(split='auto', "
            "loss=F.cross_entropy), or leave it out"
        )


def _measured(graph: LayerGraph, schedule: PipelineSchedule, context: CutContext, loss: Loss | None) -> list[int]:
    """Measure layers on this worker, and find the split that all workers agree on. Collective, for all workers."""
    groups = context.groups
    parts = groups.along("data", "shard").size * schedule.micro_batches
    unborn, device = any(parameter.is_meta for parameter in graph.model.parameters()), _device(graph.model)
    *inputs, target = tree_map_only(Tensor, lambda x: x.to("meta" if unborn else device), context.sample(parts))
    criterion = None if loss is None else lambda output: one_number(loss(output, target), "pipeline")
    costs = (count_layers if unborn else measure_layers)(graph, inputs, loss=criterion)
    memory = float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None  # a host's is shared by its workers
    problem = agree_problem(groups.everyone, groups.along("stage").rank, schedule, costs, memory=memory)
    counts = best_split(problem)
    without = "" if loss is not None else " (without the loss, which loss=... has it count)"
    context.announce(f"the split that was measured, {counts}{without}:\n{describe_split(problem, counts)}")
    return counts


def stage_bounds(
    model: nn.Module, graph: LayerGraph, asked: Sequence[int] | str, schedule: PipelineSchedule, chunks: int
) -> tuple[int, ...]:
    """Return the first layer of each stage, and the end."""
    layers, stages = len(graph.layers), schedule.stages
    if layers < stages:
        raise UsageError(
            f"pipeline(): {stages} stages ({chunks} on each worker) for {layers} layers ({', '.join(graph.layers[:6])}...): each stage "
            "needs one at least; name smaller layers, or give `stage` fewer workers"
        )
    if not isinstance(asked, str):
        counts = check_split(asked, graph.layers, stages)
    elif asked == "even":
        sizes = [LayerCost(name, float(_numel(model, graph, at)), 0.0) for at, name in enumerate(graph.layers)]
        counts = fastest_slowest(SplitProblem(sizes, schedule, [1.0] * schedule.ranks)) or []  # without a memory there is one
    else:
        raise UsageError(f"split={asked!r} is unknown; give the layers of each stage, split=[3, 4, 4, 1], 'even' or 'auto'")
    return (0, *accumulate(counts))


def _numel(model: nn.Module, graph: LayerGraph, layer: int) -> int:
    return sum(parameter.numel() for parameter in own_parameters(model, graph.part(layer, layer + 1)))


def _device(model: nn.Module) -> torch.device:
    """Return where a model is; the processor, for one without memory."""
    return next((parameter.device for parameter in model.parameters() if not parameter.is_meta), torch.device("cpu"))


def _empty(parameter: Parameter) -> Parameter:
    """Make what stands for a parameter that is elsewhere."""
    return Parameter(
        torch.empty(0, dtype=parameter.dtype, device="cpu" if parameter.is_meta else parameter.device), parameter.requires_grad
    )


def _replace(model: nn.Module, old: Parameter, new: Parameter) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new
