"""The costs of all layers of a pipeline, measured on every worker, so that split="auto" can deal
the layers by them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.parallel.containers import tree_map_only
from paceline.parallel.cut import CutContext
from paceline.parallel.pipelining.auto_split import agree_problem
from paceline.parallel.pipelining.batches import Loss, one_number
from paceline.parallel.pipelining.chain import LayerGraph
from paceline.parallel.pipelining.measuring import count_layers, measure_layers
from paceline.parallel.pipelining.schedule import PipelineSchedule
from paceline.parallel.pipelining.split import SplitProblem


@dataclass(frozen=True)
class SplitMeasurement:
    """Measures the layers of a model on all workers, which agree on one problem."""

    graph: LayerGraph
    schedule: PipelineSchedule
    context: CutContext

    def problem(self, loss: Loss | None) -> SplitProblem:
        """Measure all layers, and the loss after the last, on a sample.

        Collective, for all workers.
        """
        groups, model = self.context.groups, self.graph.model
        unborn = any(parameter.is_meta for parameter in model.parameters())
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        batch = self.context.sample(
            groups.along("data", "shard").size * self.schedule.micro_batches
        )
        *inputs, target = tree_map_only(Tensor, lambda x: x.to(device), batch)
        criterion = (
            None if loss is None else lambda output: one_number(loss(output, target), "pipeline")
        )
        find_costs = count_layers if unborn else measure_layers
        costs = find_costs(self.graph, inputs, loss=criterion)
        return agree_problem(
            groups.everyone, groups.along("stage").rank, self.schedule, costs, memory=_room(device)
        )


def _room(device: torch.device) -> float | None:
    """Return the bytes that this process can have on a device; None for the processor, whose
    memory the workers of a host share.
    """
    return (
        None
        if device.type != "cuda"
        else float(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    )
