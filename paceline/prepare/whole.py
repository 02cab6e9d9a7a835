"""Lends whole parameters of a cut model, so that a script can read or change them.

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
    """Makes parameters of a run whole while a block of the script runs."""

    def __init__(self, loop: TrainingLoop, cuts: ModelCuts, axes: RunAxes) -> None:
        self._loop, self._cuts, self._axes = loop, cuts, axes

    @contextlib.contextmanager
    def lend_whole(self, parameters: Mapping[str, Parameter]) -> Iterator[dict[str, Parameter]]:
        """Yield whole parameters, then write this worker's parts of them back.

        Collective along the cuts.

        Args:
            parameters: Parameters of the model, by name.

        Yields:
            A whole copy of each one, with its gradient if there is one.
        """
        backward = self._loop.backward
        if self._loop.abilities.remote is not None:
            raise UsageError(
                "run.whole changes parameters on workers, and with ParameterServer they are on "
                "servers: use AllReduce"
            )
        if backward.passes or backward.owing:
            self._loop.exchange_due_gradients("run.whole")
        # Gradients are exchanged by now, so they can be gathered as the values are. After the loss
        # of a worker they don't count.
        graded, wait = self._loop.is_acting, self._axes.slice.agreement.wait_for_some
        wholes = wait(
            lambda: {
                name: self._gather_parameter(name, p, graded=graded)
                for name, p in parameters.items()
            },
            "run.whole",
        )
        yield wholes
        # Each worker takes its part from its own copy, so the copies must be the same.
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
        # Workers first tell which rectangles they have, and whether they have a gradient.
        rectangles = [[list(ends) for ends in region.logical] for region in placement.regions]
        answers = group.gather_objects([rectangles, len(values)], name=f"run.whole of {name}")
        if len(values) < max(count for _, count in answers):
            # A parameter of another stage's layers has no gradient here, and other workers gather
            # theirs.
            values.append(torch.zeros_like(trained))
        gathered = [
            _assemble_tensor(value, placement, [places for places, _ in answers], group, name)
            for value in values
        ]
        whole = Parameter(gathered[0], requires_grad=trained.requires_grad)
        whole.grad = gathered[1] if len(gathered) > 1 else None
        return whole

    def _check_alike(
        self, wholes: Mapping[str, Parameter], parameters: Mapping[str, Parameter]
    ) -> None:
        for name, whole in wholes.items():
            checksums = compute_checksums(
                [whole.detach(), *([] if whole.grad is None else [whole.grad])]
            )
            _, _, group = self._find_placement(parameters[name])
            answers = group.gather_objects(checksums, name=f"what run.whole has left of {name}")
            if any(answer != answers[0] for answer in answers):
                raise UsageError(
                    f"run.whole: workers have left different values or gradients of {name}, and "
                    "each keeps a part: do the same on all workers, with random numbers from a "
                    "generator with the same seed (torch.Generator().manual_seed(run.seed))"
                )

    def _write_back(self, parameter: Parameter, whole: Parameter, *, graded: bool) -> None:
        trained, placement, _ = self._find_placement(parameter)
        # The model may still have the parameter beside the piece that is trained in its place.
        for target in (trained, *([parameter] if parameter is not trained else [])):
            target.copy_(self._cuts.placements.placement_of(target).copy_part(whole.detach()))
        if graded and whole.grad is not None and trained.grad is not None:
            trained.grad.copy_(placement.copy_part(whole.grad))
        elif graded:
            trained.grad = None if whole.grad is None else placement.copy_part(whole.grad)


def find_parameters(what: nn.Module | Parameter, cuts: ModelCuts) -> dict[str, Parameter]:
    """Find the parameters that a script means, by name; a module's by their names in it."""
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
    """Build the logical tensor from the parts of a group's workers. Collective.

    Args:
        part: This worker's part.
        placement: Its placement.
        places: Rectangles of each worker: for each dim, the first and the end index.
        group: The workers.
        name: Name of the parameter, for the exchange.
    """
    whole = part.new_empty(placement.shape)
    own_part = [region.view_local(part).reshape(-1) for region in placement.regions]
    parts = group.all_gather(
        torch.cat([part.new_empty(0), *own_part]), name=f"run.whole of {name}"
    ).wait()
    # A worker's values follow each other in the order of its rectangles.
    for rectangles, values in zip(places, parts, strict=True):
        for rectangle in rectangles:
            into = whole[tuple(slice(*ends) for ends in rectangle)]
            into.copy_(values[: into.numel()].view(into.shape))
            values = values[into.numel() :]
    return whole
