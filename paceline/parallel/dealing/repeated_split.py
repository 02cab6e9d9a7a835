"""The split of a pipeline that trains, found again: layers are measured as at the beginning, and move where that is faster.

Each worker measures all layers, with numbers of no meaning in the place of those parameters that others have: so workers that have become
slower, and a loss that takes long, are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.pairs import Pairs
from paceline.errors import UsageError
from paceline.formatting import sized
from paceline.parallel.containers import tree_map_only
from paceline.parallel.cut import CutContext
from paceline.parallel.dealing.stages import StageDealer
from paceline.parallel.pipelining.auto_split import agree_problem
from paceline.parallel.pipelining.batches import Loss, one_number
from paceline.parallel.pipelining.chain import LayerGraph, StagePart, own_parameters
from paceline.parallel.pipelining.measuring import Around, as_it_is, count_layers, measure_layers
from paceline.parallel.pipelining.model import PipelinedModel, StageSplit
from paceline.parallel.pipelining.schedule import PipelineSchedule
from paceline.parallel.pipelining.split import SplitProblem, best_split
from paceline.parallel.pipelining.split_table import describe_split

GAIN = 1.05  # times faster that a split has to be for layers to move


@dataclass(frozen=True)
class SplitMeasurement:
    """Measures the layers of a model on all workers, which agree on one problem."""

    graph: LayerGraph
    schedule: PipelineSchedule
    context: CutContext

    def problem(self, loss: Loss | None, around: Around = as_it_is) -> SplitProblem:
        """Measure all layers, and the loss after the last, on a sample. Collective, for all workers."""
        groups, model = self.context.groups, self.graph.model
        unborn = any(parameter.is_meta for parameter in model.parameters())
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        batch = self.context.sample(groups.along("data", "shard").size * self.schedule.micro_batches)
        *inputs, target = tree_map_only(Tensor, lambda x: x.to(device), batch)
        criterion = None if loss is None else lambda output: one_number(loss(output, target), "pipeline")
        if unborn:
            costs = count_layers(self.graph, inputs, loss=criterion)
        else:
            costs = measure_layers(self.graph, inputs, loss=criterion, around=around)
        return agree_problem(groups.everyone, groups.along("stage").rank, self.schedule, costs, memory=_room(device))


@contextmanager
def _stand_ins(graph: LayerGraph, made: Callable[[nn.Parameter], nn.Parameter], part: StagePart) -> Iterator[None]:
    """Have others in the place of the parameters of a part inside of the block; they are told nothing of it."""
    others, rows = dict[int, nn.Parameter](), list[tuple[dict[str, Any], str, nn.Parameter]]()
    mine = {id(parameter) for parameter in own_parameters(graph.model, part)}
    for module in graph.model.modules():
        rows += [(module._parameters, name, one) for name, one in module._parameters.items() if one is not None and id(one) in mine]
    try:
        for row, name, one in rows:
            if id(one) not in others:
                others[id(one)] = made(one)
            row[name] = others[id(one)]
        yield
    finally:
        for row, name, one in rows:
            row[name] = one


def _room(device: torch.device) -> float | None:
    """Return the bytes that this process can have on a device; None for the processor, whose memory the workers of a host share."""
    return None if device.type != "cuda" else float(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))


@dataclass(frozen=True)
class RepeatedSplit:
    """Finds the split of a pipeline again. `loss`: where the script has said it; otherwise that of its steps is measured."""

    model: PipelinedModel
    dealer: StageDealer
    measurement: SplitMeasurement
    pairs: Pairs
    loss: Loss | None = None

    def improve(self, optimizers: Sequence[Optimizer], copies: Callable[[nn.Module], Sequence[nn.Module]]) -> str | None:
        """Measure layers, and move them where a step takes less by a twentieth or more. Collective, for all workers.

        Returns what has changed, in words; None where everything stays. `optimizers`: those that step the model;
        `copies` says what else moves as it does.
        """
        split = self.model.split
        around = partial(_stand_ins, self.measurement.graph, self.dealer.stand_in)
        problem = self.measurement.problem(self.loss or self.model.loss, around)
        now, counts = [stop - start for start, stop in pairwise(split.bounds)], best_split(problem)
        takes, would = problem.timeline(now).makespan, problem.timeline(counts).makespan
        after = StageSplit((0, *accumulate(counts)), split.placed)
        if takes < GAIN * would or not self._possible(after):
            return None
        beside = copies(self.measurement.graph.model)
        self.model.share_buffers(beside)
        holding, sent = self.dealer.move(split, after, optimizers, self.pairs, beside)
        self.model.hold(holding)
        total = sum(self.measurement.context.groups.everyone.gather_objects(sent, name="split"))
        gain = f"steps are predicted to be {takes / would:.2f} times as fast ({sized(total)} have moved)"
        return f"the split is {counts} from here on, and was {now}: {gain}\n{describe_split(problem, counts)}"

    def _possible(self, split: StageSplit) -> bool:
        """Whether layers that have to be on one stage are on one."""
        try:
            self.measurement.graph.users(split.bounds[:-1])
        except UsageError:
            return False
        return True
