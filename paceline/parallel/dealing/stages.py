"""Which worker along `stage` has which parameters, by the split; tied ones may be on several.

split [2, 2]    place 0   embed, blocks.0        place 1   blocks.1, head and, as it is tied, embed
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.nn import Parameter

from paceline.comm.group import Group
from paceline.parallel.cut import CutContext
from paceline.parallel.pipelining.chain import LayerGraph
from paceline.parallel.pipelining.model import SharedParameter, StageHolding, StageSplit


class StageDealer:
    """Deals the parameters of a model to the workers of `group`, which lie along `axis`."""

    def __init__(
        self, model: nn.Module, graph: LayerGraph, group: Group, context: CutContext, axis: str
    ) -> None:
        self._model, self._graph, self._group, self._context, self._axis = (
            model,
            graph,
            group,
            context,
            axis,
        )
        self._whole = {
            name: context.placements.of(parameter, name)
            for name, parameter in model.named_parameters()
        }

    def deal(self, split: StageSplit) -> StageHolding:
        """Leave this worker the parameters of its stages, with ones of no elements in the place
        of others. Collective.
        """
        dealt = list(self._places(split))
        for name, parameter, stages in dealt:
            if self._group.rank not in _places(split, stages):
                empty = _empty(parameter, self._context.device)
                _replace(self._model, parameter, empty)
                self._context.renew(parameter, empty, self._whole[name].elsewhere(self._axis))
        now = dict(self._model.named_parameters())
        holding = self._hold(split, [(name, now[name], stages) for name, _, stages in dealt])
        self._context.tied.extend(tie.parameter for tie in holding.ties if tie.group is not None)
        return holding

    def _places(self, split: StageSplit) -> Iterator[tuple[str, Parameter, Sequence[int]]]:
        """Yield each parameter with its name and the stages that use it."""
        users = self._graph.users(split.bounds[:-1])
        return (
            (name, parameter, list(users[parameter]))
            for name, parameter in self._model.named_parameters()
        )

    def _hold(
        self, split: StageSplit, dealt: Sequence[tuple[str, Parameter, Sequence[int]]]
    ) -> StageHolding:
        """Note where parameters are, and return what this worker has. Collective."""
        ties, mine, elsewhere = (
            list[SharedParameter](),
            dict[str, Parameter](),
            dict[str, Parameter](),
        )
        groups, rank = self._context.groups, self._group.rank
        for name, parameter, stages in dealt:
            places = _places(split, stages)
            among = groups.part(self._group, places, self._axis) if len(places) > 1 else None
            if rank in places:
                self._context.placements.add(
                    parameter, self._whole[name].along(self._axis, copy=places[0] != rank)
                )
                mine[name] = parameter
                ties += [SharedParameter(parameter, among)] * (len(stages) > 1)
            else:
                elsewhere[name] = parameter
        return StageHolding(split, tuple(ties), mine, elsewhere)


def _places(split: StageSplit, stages: Sequence[int] | Mapping[int, str]) -> tuple[int, ...]:
    return tuple(sorted({split.placed[stage] for stage in stages}))


def _empty(parameter: Parameter, device: torch.device) -> Parameter:
    """Make what stands for a parameter that is elsewhere; on `device`, where it has no memory."""
    home = device if parameter.is_meta else parameter.device
    return Parameter(torch.empty(0, dtype=parameter.dtype, device=home), parameter.requires_grad)


def _replace(model: nn.Module, old: Parameter, new: Parameter) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new
