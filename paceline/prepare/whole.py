"""Lends whole parameters of a cut model: a script reads them, changes them, or adds to gradients.

    part of each worker    -- gathered along the axes of its cut -->    whole value and gradient,
                                                                        on all of them
    part of each worker    <-- its part of the changed value --------   whole

All workers must do the same in the block, and this is checked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from paceline.comm.group_protocol import Group
from paceline.errors import UsageError
from paceline.loop.turns import TrainingLoop
from paceline.parallel.placement import Placement
from paceline.prepare.cuts import ModelCuts
from paceline.state.checksum import compute_checksums
from paceline.workers.axes import RunAxes


class WholeParameters:
    """Makes parameters of a run whole, for the time of a block of the script."""

    def __init__(self, loop: TrainingLoop, cuts: ModelCuts, axes: RunAxes) -> None:
        self._loop, self._cuts, self._axes = loop, cuts, axes

    @contextlib.contextmanager
    def lend_whole(self, parameters: Mapping[str, Parameter]) -> Iterator[dict[str, Parameter]]:
        """Yield a whole parameter for each one, and take this worker's part of what is left of it.

        Collective along the cuts.
        """
        backward = self._loop.backward
        if self._loop.abilities.remote is not None:
            raise UsageError(
                "run.whole changes parameters on workers, and with ParameterServer servers keep "
                "them: use AllReduce"
            )
        if backward.passes or backward.owing:
            self._loop.exchange_due_gradients("run.whole")
        # Gradients are exchanged, so they can be made whole as the values are.
        graded, wait = self._loop.is_acting, self._axes.slice.agreement.wait_for_some
        wholes = wait(
            lambda: {
                name: self._gather_parameter(name, p, graded=graded)
                for name, p in parameters.items()
            },
            "run.whole",
        )
        yield wholes
        # Workers must have left the same, as each takes its part of its own copy.
        wait(lambda: self._check_alike(wholes, parameters), "run.whole")
        with torch.no_grad():
            for name, parameter in parameters.items():
                self._write_back(parameter, wholes[name], graded=graded)
        if any(self._cuts.placements.placement_of(p).is_flat for p in parameters.values()):
            self._cuts.follow_pieces()

    def _find_placement(self, parameter: Parameter) -> tuple[Parameter, Placement, Group]:
        trained = self._cuts.trained_tensor(parameter)
        placement = self._cuts.placements.placement_of(trained)
        return trained, placement, self._axes.groups.group_along(*placement.axes)

    def _gather_parameter(self, name: str, parameter: Parameter, *, graded: bool) -> Parameter:
        trained, placement, group = self._find_placement(parameter)
        values = [
            trained.detach(),
            *([trained.grad] if graded and trained.grad is not None else []),
        ]
        facts = [
            [[list(ends) for ends in region.logical] for region in placement.regions],
            len(values),
        ]
        told = group.gather_objects(facts, name=f"run.whole of {name}")
        if len(values) < max(count for _, count in told):
            values.append(torch.zeros_like(trained))  # of layers that other stages have
        gathered = [
            _assemble_tensor(value, placement, [places for places, _ in told], group, name)
            for value in values
        ]
        whole = Parameter(gathered[0], requires_grad=trained.requires_grad)
        whole.grad = gathered[1] if len(gathered) > 1 else None
        return whole

    def _check_alike(
        self, wholes: Mapping[str, Parameter], parameters: Mapping[str, Parameter]
    ) -> None:
        for name, whole in wholes.items():
            rest = compute_checksums(
                [whole.detach(), *([] if whole.grad is None else [whole.grad])]
            )
            told = self._find_placement(parameters[name])[2].gather_objects(
                rest, name=f"what run.whole has left of {name}"
            )
            if any(other != told[0] for other in told):
                raise UsageError(
                    f"run.whole: workers have left different values or gradients of {name}, and "
                    "each keeps a part: do the same on all of "
                    "them, with random numbers of a generator of one seed "
                    "(torch.Generator().manual_seed(run.seed))"
                )

    def _write_back(self, parameter: Parameter, whole: Parameter, *, graded: bool) -> None:
        trained, placement, _ = self._find_placement(parameter)
        for one in (trained, *([parameter] if parameter is not trained else [])):
            one.copy_(self._cuts.placements.placement_of(one).copy_part(whole.detach()))
        if graded and whole.grad is not None and trained.grad is not None:
            trained.grad.copy_(placement.copy_part(whole.grad))
        elif graded:
            trained.grad = None if whole.grad is None else placement.copy_part(whole.grad)


def find_parameters(what: nn.Module | Parameter, cuts: ModelCuts) -> dict[str, Parameter]:
    """Parameters that a script names, by name; those of a module by their names in it."""
    if isinstance(what, nn.Module):
        return dict(what.named_parameters())
    if not isinstance(what, Parameter):
        raise UsageError(
            f"run.whole got a {type(what).__qualname__}; give it a parameter, or a module, whose "
            "parameters it takes by name"
        )
    return {cuts.placements.placement_of(cuts.trained_tensor(what)).name or "a parameter": what}


def _assemble_tensor(
    part: Tensor, placement: Placement, places: list[list[list[list[int]]]], group: Group, name: str
) -> Tensor:
    """Build the logical tensor from the parts of a group's workers, which lie at `places`."""
    whole = part.new_empty(placement.shape)
    own_part = [region.view_local(part).reshape(-1) for region in placement.regions]
    parts = group.all_gather(
        torch.cat([part.new_empty(0), *own_part]), name=f"run.whole of {name}"
    ).wait()
    for rectangles, values in zip(places, parts, strict=True):
        for rectangle in rectangles:
            into = whole[tuple(slice(*ends) for ends in rectangle)]
            into.copy_(values[: into.numel()].view(into.shape))
            values = values[into.numel() :]
    return whole
