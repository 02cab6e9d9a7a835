"""Layers of one worker over several of its devices; no other worker takes part.

layers("auto", devices=["cuda:0", "cuda:1"])      consecutive layers on each of the two devices

The training loop is that of any model: `model(x)` goes from device to device.
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
from paceline.parallel.dealing.placed_forward import PlacedForward
from paceline.parallel.pipeline import find_stage_bounds
from paceline.parallel.pipelining.auto_split import MeasuredPlace, agree_places
from paceline.parallel.pipelining.batches import Loss, check_scalar_loss
from paceline.parallel.pipelining.layer_graph import (
    LayerGraph,
    StagePart,
    list_part_parameters,
    trace_layers,
)
from paceline.parallel.pipelining.measuring import (
    count_layers,
    iterate_part_buffers,
    measure_layers,
)
from paceline.parallel.pipelining.schedule import PipelineSchedule
from paceline.parallel.pipelining.schedules import make_schedule
from paceline.parallel.pipelining.split import LayerCost, find_best_split
from paceline.parallel.pipelining.split_table import describe_split


@dataclass(frozen=True)
class DeviceLayers:
    """Layers that are dealt to devices. Fields have the meaning that they have in `pipeline`."""

    names: str | Sequence[str]
    devices: Sequence[str | torch.device]
    split: Sequence[int] | str
    trace: bool
    inputs: Sequence[str] | None
    loss: Loss | None


def spread_layers(model: nn.Module, cut: DeviceLayers, context: CutContext) -> None:
    """Let consecutive layers of a model run on the devices of a cut.

    Parameters move to their devices once they have values. If the split is measured, this is
    collective, as all workers take the same split.
    """
    if "stage" in context.mesh.names:
        raise UsageError(
            "layers(devices=...) deals layers to devices of each worker, and the mesh "
            f"({context.mesh}) has an axis stage, which deals "
            "them to workers: take stage out of the mesh, or leave out devices="
        )
    devices = _check_devices(cut.devices)
    graph = trace_layers(model, cut.names, trace=cut.trace, inputs=cut.inputs)
    if len(graph.layers) < len(devices):
        raise UsageError(
            f"layers(): {len(devices)} devices for {len(graph.layers)} layers "
            f"({', '.join(graph.layers)}): each device needs one at least; "
            "name smaller layers, or fewer devices"
        )
    schedule = make_schedule("gpipe", len(devices), 1)
    requested = (
        _measure_split(graph, schedule, devices, context, cut.loss)
        if cut.split == "auto"
        else cut.split
    )
    bounds = find_stage_bounds(model, graph, requested, schedule, 1)
    places = [
        place for place, (start, stop) in enumerate(pairwise(bounds)) for _ in range(start, stop)
    ]
    # Parameters may have no memory yet, and get it from the run. They move afterwards.
    forward = PlacedForward(model, graph, places, devices)
    model.forward = forward
    context.value_callbacks.append(forward.move_state)
    # Autograd has a thread for each device. With several of them, gradients of two devices would
    # come in another order on each worker, and collectives have to begin in the same one.
    one_thread = ExitStack()
    one_thread.enter_context(torch.autograd.set_multithreading_enabled(False))
    context.close_callbacks.append(one_thread.close)


def _check_devices(names: Sequence[str | torch.device]) -> list[torch.device]:
    """Make devices of their names. Raises `UsageError` for one that this machine doesn't have."""
    count, devices = torch.cuda.device_count(), list[torch.device]()
    for each in names:
        try:
            device = torch.device(each)
        except (RuntimeError, TypeError):
            device = torch.device("meta")  # refused below
        if device.type not in ("cpu", "cuda") or (device.type == "cuda" and device.index is None):
            raise UsageError(
                f"layers(): {each!r} is not a device for layers; "
                "give 'cpu' or 'cuda:0', 'cuda:1', ..."
            )
        if device.type == "cuda" and device.index >= count:
            has = f"has {count} of them, from cuda:0 on" if count else "has no CUDA device"
            raise UsageError(
                f"layers(): there is no device {each!r}, as this machine {has}; "
                "name devices that it has"
            )
        devices.append(device)
    return devices


def _measure_split(
    graph: LayerGraph,
    schedule: PipelineSchedule,
    devices: Sequence[torch.device],
    context: CutContext,
    loss: Loss | None,
) -> list[int]:
    """Measure layers on each device, and find the split that all workers take. Collective."""
    unborn = any(parameter.is_meta for parameter in graph.model.parameters())
    batch = context.make_sample(context.groups.group_along("data", "shard").size)

    def measure(device: torch.device) -> list[LayerCost]:
        *inputs, target = tree_map_only(Tensor, lambda x: x.to("meta" if unborn else device), batch)
        criterion = (
            None
            if loss is None
            else lambda output: check_scalar_loss(loss(output, target), "layers")
        )
        if unborn:
            return count_layers(graph, inputs, loss=criterion)
        return measure_layers(
            graph, inputs, loss=criterion, around=partial(_on_device, graph, device)
        )

    # A device that is named twice is measured once, and its memory is divided.
    costs, times = {device: measure(device) for device in dict.fromkeys(devices)}, Counter(devices)
    measured = [
        MeasuredPlace(place, costs[device], _free_bytes(device, times[device]))
        for place, device in enumerate(devices)
    ]
    problem = agree_places(context.groups.everyone, schedule, measured)
    counts = find_best_split(problem)
    context.announce(
        f"the split over {', '.join(map(str, devices))} that was measured, "
        f"{counts}:\n{describe_split(problem, counts)}"
    )
    return counts


@contextmanager
def _on_device(graph: LayerGraph, device: torch.device, part: StagePart) -> Iterator[None]:
    """Hold a part of a model on a device inside of the block."""
    tensors = (*list_part_parameters(graph.model, part), *iterate_part_buffers(graph.model, part))
    homes = [(one, one.data) for one in tensors if one.device != device]
    try:
        for one, data in homes:
            one.data = data.to(device)
        yield
    finally:
        for one, data in homes:
            one.data = data


def _free_bytes(device: torch.device, times: int) -> float | None:
    """Free bytes of a GPU for each of the `times` it is named; None for the CPU."""
    return torch.cuda.mem_get_info(device)[0] / times if device.type == "cuda" else None
