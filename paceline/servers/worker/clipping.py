"""Clipping of steps on servers: which steps are clipped together, and by what factor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.sync.base import Slot


class PendingClip(NamedTuple):
    """A clip of the next steps of several optimizers together.

    Args:
        optimizers: Index of each optimizer.
        max_norm: Norm that their gradients may have together at most.
        norm_type: Order p of the p-norm.
    """

    optimizers: list[int]
    max_norm: float
    norm_type: float

    def compute_factor(self, norms: Sequence[float]) -> tuple[float, float]:
        """Compute the total norm from the norms of all parts, and the factor of the gradients."""
        total = float(
            torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), self.norm_type)
        )
        return total, compute_clip_factor(total, self.max_norm)


def find_clipped_optimizers(
    parameters: Sequence[Tensor], slots: Sequence[Slot], owners: Sequence[int]
) -> list[int]:
    """Find the optimizers of these parameters. `owners` is the optimizer of each slot.

    Raises `UsageError` if one of them has other parameters, too.
    """
    given = {id(parameter) for parameter in parameters}
    optimizers = sorted(
        {owner for slot, owner in zip(slots, owners, strict=True) if id(slot.parameter) in given}
    )
    owned = {
        id(slot.parameter) for slot, owner in zip(slots, owners, strict=True) if owner in optimizers
    }
    if not optimizers or not owned <= given:
        raise UsageError(
            "with ParameterServer run.clip takes all parameters of an optimizer together, as only "
            "servers have the gradients of all workers: give it the model that the optimizer was "
            "made for"
        )
    return optimizers


def compute_gradient_norm(slots: Sequence[Slot], kind: float) -> float:
    """Compute the norm of this worker's own gradients of these parameters."""
    return float(
        nn.utils.get_total_norm(
            [slot.parameter.grad for slot in slots if slot.parameter.grad is not None], kind
        )
    )


def compute_clip_factor(norm: float, limit: float) -> float:
    """Compute the factor that clips a gradient to `limit`, as `nn.utils.clip_grad_norm_` does."""
    return min(1.0, limit / (norm + 1e-6))
