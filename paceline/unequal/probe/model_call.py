"""A call of a model, as a script made it, and the same call with fewer samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from paceline.parallel.containers import tree_map


@dataclass
class ModelCall:
    """A call of the model with the whole batch, as the script made it.

    Attributes:
        model: The model.
        args: Positional arguments.
        kwargs: Keyword arguments.
        loss: Computes the loss of an output and a target, if `run.step` was given one.
        target: The target.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any, Any], Tensor] | None = None
    target: Any = None

    def take_rows(self, wanted: int, whole: int) -> ModelCall:
        """Make the call with the first `wanted` of `whole` samples."""
        args, kwargs, target = cut_rows((self.args, dict(self.kwargs), self.target), wanted, whole)
        return ModelCall(self.model, args, kwargs, self.loss, target)

    def compute_loss(self, output: Any) -> Tensor:
        """Compute the loss of an output. Only for a call that has one."""
        assert self.loss is not None
        return self.loss(output, self.target)


def cut_rows(values: Any, wanted: int, whole: int) -> Any:
    """Copy the first samples of all tensors with a row for each of the `whole` samples."""
    return tree_map(
        lambda leaf: (
            leaf[:wanted].clone()
            if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == whole
            else leaf
        ),
        values,
    )
