"""Measures all layers of a pipeline on every worker, so that split="auto" can deal the layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.parallel.containers import tree_map_only
from paceline.parallel.cut import CutContext
from paceline.parallel.pipelining.auto_split import agree_problem
from paceline.parallel.pipelining.batches import Loss, check_scalar_loss
from paceline.parallel.pipelining.layer_graph import LayerGraph
from paceline.parallel.pipelining.measuring import count_layers, measure_layers
from paceline.parallel.pipelining.schedule import PipelineSchedule
from paceline.parallel.pipelining.split import SplitProblem


@dataclass(frozen=True)
class SplitMeasurement:
    """Measures the layers of a model. All workers agree on one problem from their measurements."""

    graph: LayerGraph
    schedule: PipelineSchedule
    context: CutContext

    def measure_problem(self, loss: Loss | None) -> SplitProblem:
        """Measure all layers on a sample, and the loss. Collective, for all workers."""
        groups, model = self.context.groups, self.graph.model
        unborn = any(parameter.is_meta for parameter in model.parameters())
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        batch = self.context.make_sample(
            groups.group_along("data", "shard").size * self.schedule.micro_batches
        )
        *inputs, target = tree_map_only(Tensor, lambda x: x.to(device), batch)
        criterion = (
            None
            if loss is None
            else lambda output: check_scalar_loss(loss(output, target), "pipeline")
        )
        find_costs = count_layers if unborn else measure_layers
        costs = find_costs(self.graph, inputs, loss=criterion)
        return agree_problem(
            groups.everyone,
            groups.group_along("stage").rank,
            self.schedule,
            costs,
            memory=_free_bytes(device),
        )


def _free_bytes(device: torch.device) -> float | None:
    """Bytes that this process can use on a GPU; None for the CPU, whose memory workers share."""
    return (
        None
        if device.type != "cuda"
        else float(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    )
