"""Runs models of any layout without gradients, and gathers the output on all their workers.

              tensor 0          tensor 1
data 0        output a          output a        the same samples, parts of each layer: the parts
                                                of the logits are put together
data 1        output b          output b        other samples
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.parallel.containers import tree_map
from paceline.parallel.pipelining.batches import BatchShare
from paceline.prepare.cuts import ModelCuts
from paceline.prepare.device import make_mover
from paceline.prepare.tensor_peers import EARLY, OFTEN, check_equal
from paceline.workers.axes import RunAxes


class ModelInference:
    """Runs the models of a run.

    The first calls, and a few later ones, check that workers along `tensor` have the same inputs.
    """

    def __init__(self, axes: RunAxes, cuts: ModelCuts, device: torch.device) -> None:
        self._axes, self._cuts, self._move = axes, cuts, make_mover(device)
        self._calls = 0

    def run_forward(self, model: nn.Module, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Run a model without gradients, and gather its whole output.

        Collective along the axes by which the model is cut.
        """
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"run.forward got a {type(model).__qualname__}; give the model first, "
                "and then its inputs"
            )
        self._calls += 1
        if self._calls == 1:
            self._cuts.check_used()
        # the check is collective, so the number of the call decides, which is equal on all workers
        group = self._axes.groups.group_along("stage", "tensor")
        if group.size > 1 and (self._calls <= EARLY or self._calls % OFTEN == 0):
            hint = "give both the same, as each of them has a part of the model"
            check_equal(
                group,
                [*args, *options.values()],
                f"the input of run.forward (call {self._calls})",
                hint,
            )
        if self._move is not None:
            args, options = self._move((*args,)), self._move(dict(options))
        with torch.no_grad():
            stages = self._cuts.pipeline_of(model)
            if stages is not None:
                self._cuts.level_ties()
                return stages.run_forward(
                    BatchShare(tuple(args), options, None, None),
                    lambda out: tree_map(_gather_output, out),
                )
            return tree_map(_gather_output, model(*args, **options))


def _gather_output(value: Any) -> Any:
    # Imported here, as this module imports torch's compiler, which takes half a second.
    from paceline.parallel.tensor.vocab import VocabLogits

    return (
        value.whole()
        if isinstance(value, VocabLogits)
        else value.detach()
        if isinstance(value, Tensor)
        else value
    )
