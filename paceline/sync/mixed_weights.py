"""Finds gradients that add up passes of different weights.

If optimizers step on servers, a worker sends its own gradient with one weight, that of its last
pass. So a p.grad must not add up passes in which the worker's part of the batch differed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor


class NamedGradient(Protocol):
    """Number and name of a parameter."""

    index: int
    name: str


class MixedWeights:
    """Numbers of the parameters whose p.grad adds up passes of different weights."""

    def __init__(self, hooks: Mapping[int, NamedGradient]) -> None:
        self._hooks = hooks  # by id of the parameter
        # This worker's part of the batch in the last exchanged pass.
        self._last_part: float | None = None
        self.mixed_numbers: set[int] = set()

    def record_part(self, part: float) -> bool:
        """Record this worker's part of the batch in a pass; say if it differs from the last."""
        before, self._last_part = self._last_part, part
        return before not in (None, part)

    def record_prior(self, number: int, prior: Tensor | None, *, uneven: bool) -> None:
        """Record that a pass is added to a p.grad.

        Args:
            number: Number of the parameter.
            prior: p.grad before the pass; None if it had none.
            uneven: Whether this pass has another weight than the one before it.
        """
        if prior is None or not bool(prior.any()):
            self.mixed_numbers.discard(number)
        elif uneven:
            self.mixed_numbers.add(number)

    def find_mixed(self, parameters: Iterable[Any]) -> str | None:
        """Name one of these parameters whose p.grad mixes weights; None if there is none."""
        for parameter in parameters if self.mixed_numbers else ():
            hook = self._hooks.get(id(parameter))
            if (
                hook is not None
                and hook.index in self.mixed_numbers
                and parameter.grad is not None
                and bool(parameter.grad.any())
            ):
                return hook.name
        return None

    def clear_numbers(self) -> None:
        """Forget all parameters."""
        self.mixed_numbers.clear()
