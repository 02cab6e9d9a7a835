"""Copies of cut models that scripts keep, such as averages of their parameters: each parameter lies where that of the model does.

model      tokens.weight  11 x 12 on this worker, nothing on the next      a checkpoint has one tensor of both
copy       average.module.tokens.weight: the same
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from paceline.parallel.placement import Placements


class ModelCopy(NamedTuple):
    """A copy, under the name of what it was kept in, and the model."""

    name: str
    copy: nn.Module
    model: nn.Module


class ModelCopies:
    """Finds copies in what is kept, and notes where their parameters are."""

    def __init__(self, placements: Placements) -> None:
        self._placements = placements
        self._found: list[ModelCopy] = []

    def find(self, name: str, thing: object, models: Iterable[nn.Module]) -> None:
        """Look for copies of these models in a thing that is kept: modules whose parameters have their names and sizes."""
        if not isinstance(thing, nn.Module):
            return
        wanted = [(model, _sizes(model)) for model in models]
        for path, module in thing.named_modules():
            model = next((model for model, sizes in wanted if module is not model and sizes and sizes == _sizes(module)), None)
            if model is not None:
                self._found.append(ModelCopy(f"{name}.{path}" if path else name, module, model))
        self.place()

    def place(self) -> None:
        """Note where the parameters of all copies are: where those of their models are now."""
        for name, copy, model in self._found:
            for (key, mine), original in zip(copy.named_parameters(), model.parameters(), strict=True):
                placement = self._placements.of(original)
                if placement.axes and placement.local == tuple(mine.shape):
                    self._placements.add(mine, replace(placement, name=f"{name}.{key}"))

    def of(self, model: nn.Module) -> list[nn.Module]:
        """Return the copies of a model."""
        return [copy for _, copy, other in self._found if other is model]


def _sizes(model: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
