"""What the training loop has to know of models that are cut."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from torch import nn

from paceline.parallel.pipelining.pipelined_model import PipelinedModel


class CutModels(Protocol):
    """The cuts of a run's models."""

    @property
    def applied(self) -> Collection[Any]:
        """Cuts that were made; none where all of the models is on each worker."""
        ...

    def pipeline_of(self, model: nn.Module) -> PipelinedModel | None:
        """Return the pipeline that a model is cut into; None for one whose layers are all here."""
        ...

    def level_ties(self) -> None:
        """Give all stages that have a tied weight the same values. Collective."""
        ...
