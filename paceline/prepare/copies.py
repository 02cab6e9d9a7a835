"""Copies of cut models that scripts keep, such as averages. They are cut as their models are.

model    tokens.weight                  11 x 12 here, nothing on the next worker
                                        a checkpoint has one tensor, made of both parts
copy     average.module.tokens.weight   the same
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from torch import nn
from torch.optim.swa_utils import AveragedModel

from paceline.errors import UsageError
from paceline.parallel.placement import Placements


class ModelCopy(NamedTuple):
    """A copy of a model. `name` is the name of the kept object, and the path of the copy in it."""

    name: str
    copy: nn.Module
    model: nn.Module


class ModelCopies:
    """Finds copies of models in kept objects, and notes the placements of their parameters."""

    def __init__(self, placements: Placements) -> None:
        self._placements = placements
        self._copies: list[ModelCopy] = []

    def find_copies(self, name: str, thing: object, models: Iterable[nn.Module]) -> None:
        """Find copies of models in a kept object.

        A copy is a module whose parameters have the same names and shapes as those of the model.

        Args:
            name: Name of the kept object.
            thing: The kept object.
            models: The models.
        """
        if not isinstance(thing, nn.Module):
            return
        shapes_by_model = [(model, _list_shapes(model)) for model in models]
        for path, module in thing.named_modules():
            # A model without parameters would match every module without parameters.
            model = next(
                (
                    model
                    for model, shapes in shapes_by_model
                    if module is not model and shapes and shapes == _list_shapes(module)
                ),
                None,
            )
            if model is not None:
                self._copies.append(ModelCopy(f"{name}.{path}" if path else name, module, model))
                self._note_placements(self._copies[-1])

    def _note_placements(self, model_copy: ModelCopy) -> None:
        """Note that the parameters of a copy have the placements of its model's parameters."""
        for (key, copied), original in zip(
            model_copy.copy.named_parameters(), model_copy.model.parameters(), strict=True
        ):
            placement = self._placements.placement_of(original)
            if placement.axes and placement.local == tuple(copied.shape):
                self._placements.add_placement(
                    copied, replace(placement, name=f"{model_copy.name}.{key}")
                )

    def copies_of(self, model: nn.Module) -> list[nn.Module]:
        """Copies of a model in kept objects."""
        return [copy for _, copy, other in self._copies if other is model]


def watch_averages() -> None:
    """Make torch's averages explain the error if parameters were cut after they were made.

    torch itself would fail with a message about two sizes. The method of the class is replaced,
    once for the process, because a script makes its averages at any time.
    """
    own = AveragedModel.update_parameters
    if getattr(own, "_paceline_checked", False):
        return

    def update_parameters(self: AveragedModel, model: nn.Module) -> None:
        for (name, averaged), current in zip(
            self.module.named_parameters(), model.parameters(), strict=False
        ):
            if averaged.shape != current.shape:
                raise UsageError(
                    "this AveragedModel was made before run.prepare cut the model: "
                    f"its {name} has shape {list(averaged.shape)}, and the model's has "
                    f"{list(current.shape)} on this worker; "
                    "make it from the model that run.prepare returns"
                )
        own(self, model)

    update_parameters._paceline_checked = True  # type: ignore[attr-defined]
    AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign]


def _list_shapes(model: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
