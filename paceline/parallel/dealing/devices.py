"""Layers of one worker over several of its devices: no other worker takes part, and the training
loop is that of any model.

layers("auto", devices=["cuda:0", "cuda:1"])      consecutive layers on each; model(x) goes from
                                                  device to device
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.parallel.containers import tree_map_only
from paceline.parallel.cut import CutContext
from paceline.parallel.dealing.placed import PlacedForward
from paceline.parallel.pipeline import stage_bounds
from paceline.parallel.pipelining.auto_split import MeasuredPlace, agree_places
from paceline.parallel.pipelining.batches import Loss, one_number
from paceline.parallel.pipelining.chain import LayerGraph, StagePart, own_parameters, trace_layers
from paceline.parallel.pipelining.measuring import count_layers, measure_layers, part_buffers
from paceline.parallel.pipelining.schedule import PipelineSchedule
from paceline.parallel.pipelining.schedules import make_schedule
from paceline.parallel.pipelining.split import LayerCost, best_split
from paceline.parallel.pipelining.split_table import describe_split


@dataclass(frozen=True)
class DeviceLayers:
    """Layers, by their names, that are dealt to devices; the rest as `pipeline` has it."""

    names: str | Sequence[str]
    devices: Sequence[str | torch.device]
    split: Sequence[int] | str
    trace: bool
    inputs: Sequence[str] | None
    loss: Loss | None


def spread(model: nn.Module, cut: DeviceLayers, context: CutContext) -> None:
    """Have consecutive layers of a model run on the devices of a cut, where their parameters go
    once they have values.

    Collective where the split is measured: workers have the same one.
    """
    if "stage" in context.mesh.names:
        raise UsageError(
            "layers(devices=...) deals layers to devices of each worker, and the mesh "
            f"({context.mesh}) has an axis stage, which deals "
            "them to workers: take stage out of the mesh, or leave out devices="
        )
    devices = _checked(cut.devices)
    graph = trace_layers(model, cut.names, trace=cut.trace, inputs=cut.inputs)
    if len(graph.layers) < len(devices):
        raise UsageError(
            f"layers(): {len(devices)} devices for {len(graph.layers)} layers "
            f"({', '.join(graph.layers)}): each device needs one at least; "
            "name smaller layers, or fewer devices"
        )
    schedule = make_schedule("gpipe", len(devices), 1)
    asked = (
        _measured(graph, schedule, devices, context, cut.loss) if cut.split == "auto" else cut.split
    )
    bounds = stage_bounds(model, graph, asked, schedule, 1)
    places = [
        place for place, (start, stop) in enumerate(pairwise(bounds)) for _ in range(start, stop)
    ]
    forward = PlacedForward(model, graph, places, devices)
    model.forward = forward
    context.valued.append(forward.place)
    # or each device has its own, and gradients of two of them come in another order on each worker
    one_thread = ExitStack()
    one_thread.enter_context(torch.autograd.set_multithreading_enabled(False))
    context.endings.append(one_thread.close)


def _checked(given: Sequence[str | torch.device]) -> list[torch.device]:
    """Return devices that are there. Raises `UsageError` for others."""
    count, found = torch.cuda.device_count(), list[torch.device]()
    for each in given:
        try:
            device = torch.device(each)
        except (RuntimeError, TypeError):
            device = torch.device("meta")
        if device.type not in ("cpu", "cuda") or (device.type == "cuda" and device.index is None):
            raise UsageError(
                f"layers(): {each!r} is no device that layers can be on; "
                "possible are 'cpu' and 'cuda:0', 'cuda:1', ..."
            )
        if device.type == "cuda" and device.index >= count:
            has = f"has {count} of them, from cuda:0 on" if count else "has no CUDA device"
            raise UsageError(
                f"layers(): {each!r} was asked for, and this machine {has}; "
                "name devices that are there"
            )
        found.append(device)
    return found


def _measured(
    graph: LayerGraph,
    schedule: PipelineSchedule,
    devices: Sequence[torch.device],
    context: CutContext,
    loss: Loss | None,
) -> list[int]:
    """Measure layers on each device, and find the split that all workers agree on. Collective."""
    unborn = any(parameter.is_meta for parameter in graph.model.parameters())
    batch = context.sample(context.groups.along("data", "shard").size)

    def measure(device: torch.device) -> list[LayerCost]:
        *inputs, target = tree_map_only(Tensor, lambda x: x.to("meta" if unborn else device), batch)
        criterion = (
            None if loss is None else lambda output: one_number(loss(output, target), "layers")
        )
        if unborn:
            return count_layers(graph, inputs, loss=criterion)
        return measure_layers(
            graph, inputs, loss=criterion, around=partial(_on_device, graph, device)
        )

    costs, times = {device: measure(device) for device in dict.fromkeys(devices)}, Counter(devices)
    measured = [
        MeasuredPlace(place, costs[device], _room(device, times[device]))
        for place, device in enumerate(devices)
    ]
    problem = agree_places(context.groups.everyone, schedule, measured)
    counts = best_split(problem)
    context.announce(
        f"the split over {', '.join(map(str, devices))} that was measured, "
        f"{counts}:\n{describe_split(problem, counts)}"
    )
    return counts


@contextmanager
def _on_device(graph: LayerGraph, device: torch.device, part: StagePart) -> Iterator[None]:
    """Have a part of a model on a device inside of the block."""
    held = (*own_parameters(graph.model, part), *part_buffers(graph.model, part))
    homes = [(one, one.data) for one in held if one.device != device]
    try:
        for one, data in homes:
            one.data = data.to(device)
        yield
    finally:
        for one, data in homes:
            one.data = data


def _room(device: torch.device, times: int) -> float | None:
    """Return the bytes that are free on a device that is named so many times; None for the
    processor, whose memory is a host's.
    """
    return torch.cuda.mem_get_info(device)[0] / times if device.type == "cuda" else None
