"""Clipping of steps on servers: which steps are clipped together, and by what factor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.sync.base import Slot


class PendingClip(NamedTuple):
    """A clip of the next steps of these optimizers (`numbers`) together, to a norm of at most
    `most`, of this kind.
    """

    numbers: list[int]
    most: float
    kind: float

    def shrink(self, norms: Sequence[float]) -> tuple[float, float]:
        """Return the norm of the whole, from those of its parts, and the factor that gradients
        are multiplied by.
        """
        total = float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), self.kind))
        return total, shrink(total, self.most)


def covered(
    parameters: Sequence[Tensor], slots: Sequence[Slot], owners: Sequence[int]
) -> list[int]:
    """Return the optimizers of these parameters.

    Raises `UsageError` if one has others, too. `owners`: the optimizer of each slot.
    """
    mine = {id(parameter) for parameter in parameters}
    numbers = sorted(
        {owner for slot, owner in zip(slots, owners, strict=True) if id(slot.parameter) in mine}
    )
    theirs = {
        id(slot.parameter) for slot, owner in zip(slots, owners, strict=True) if owner in numbers
    }
    if not numbers or not theirs <= mine:
        raise UsageError(
            "with ParameterServer run.clip takes all parameters of an optimizer together, as only "
            "servers have the gradients of all "
            "workers: give it the model that the optimizer was made for"
        )
    return numbers


def own_norm(slots: Sequence[Slot], kind: float) -> float:
    """Return the norm of this worker's own gradients of these parameters."""
    return float(
        nn.utils.get_total_norm(
            [slot.parameter.grad for slot in slots if slot.parameter.grad is not None], kind
        )
    )


def shrink(norm: float, limit: float) -> float:
    """Return the factor that clips gradients of such a norm (as in `nn.utils.clip_grad_norm_`)."""
    return min(1.0, limit / (norm + 1e-6))
