"""Deals a model's parameters to the stages of a pipeline; tied ones may be on several stages.

split [2, 2]    place 0   embed, blocks.0        place 1   blocks.1, head and, as it is tied, embed
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.nn import Parameter

from paceline.comm.group_protocol import Group
from paceline.parallel.cut import CutContext
from paceline.parallel.pipelining.layer_graph import LayerGraph
from paceline.parallel.pipelining.pipelined_model import SharedParameter, StageHolding, StageSplit


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
        self._initial_placements = {
            name: context.placements.placement_of(parameter, name)
            for name, parameter in model.named_parameters()
        }

    def deal_parameters(self, split: StageSplit) -> StageHolding:
        """Leave this worker its stages' parameters, and empty ones for all others. Collective."""
        dealt = list(self._find_stages(split))
        for name, parameter, stages in dealt:
            if self._group.rank not in _places_of_stages(split, stages):
                empty = _make_empty(parameter, self._context.device)
                _replace_parameter(self._model, parameter, empty)
                self._context.replace_parameter(
                    parameter, empty, self._initial_placements[name].hold_nothing(self._axis)
                )
        # Ask the model again, as parameters of other stages have been replaced.
        now = dict(self._model.named_parameters())
        holding = self._note_placements(
            split, [(name, now[name], stages) for name, _, stages in dealt]
        )
        self._context.tied.extend(tie.parameter for tie in holding.ties if tie.group is not None)
        return holding

    def _find_stages(self, split: StageSplit) -> Iterator[tuple[str, Parameter, Sequence[int]]]:
        """Iterate over all parameters, each with its name and the stages that use it."""
        users = self._graph.find_users(split.bounds[:-1])
        return (
            (name, parameter, list(users[parameter]))
            for name, parameter in self._model.named_parameters()
        )

    def _note_placements(
        self, split: StageSplit, dealt: Sequence[tuple[str, Parameter, Sequence[int]]]
    ) -> StageHolding:
        """Note where each parameter is, and list those of this worker. Collective."""
        ties, own, elsewhere = (
            list[SharedParameter](),
            dict[str, Parameter](),
            dict[str, Parameter](),
        )
        groups, rank = self._context.groups, self._group.rank
        for name, parameter, stages in dealt:
            places = _places_of_stages(split, stages)
            # All workers make the group of a tied parameter, in the same order, to sum its
            # gradients.
            among = (
                groups.subgroup_along(self._group, places, self._axis) if len(places) > 1 else None
            )
            if rank in places:
                # Of several copies, that of the first place counts in checkpoints and norms.
                self._context.placements.add_placement(
                    parameter,
                    self._initial_placements[name].hold_along(self._axis, copy=places[0] != rank),
                )
                own[name] = parameter
                ties += [SharedParameter(parameter, among)] * (len(stages) > 1)
            else:
                elsewhere[name] = parameter
        return StageHolding(split, tuple(ties), own, elsewhere)


def _places_of_stages(
    split: StageSplit, stages: Sequence[int] | Mapping[int, str]
) -> tuple[int, ...]:
    return tuple(sorted({split.placed[stage] for stage in stages}))


def _make_empty(parameter: Parameter, device: torch.device) -> Parameter:
    """Make the empty parameter that stands for one of another stage."""
    home = device if parameter.is_meta else parameter.device
    return Parameter(torch.empty(0, dtype=parameter.dtype, device=home), parameter.requires_grad)


def _replace_parameter(model: nn.Module, old: Parameter, new: Parameter) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new
