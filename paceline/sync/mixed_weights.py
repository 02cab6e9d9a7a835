"""Finds gradients that add up passes of different weights, where each worker's own go to servers
with the weight of the last pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor


class NamedGradient(Protocol):
    """What has to be known of a parameter."""

    index: int
    name: str


class MixedWeights:
    """What is known of the weights of passes, and of the parameters (by number) whose p.grad
    adds up passes of different ones.
    """

    def __init__(self, hooks: Mapping[int, NamedGradient]) -> None:
        self._hooks = hooks  # by id of the parameter
        self._part: float | None = None  # my part of the batch, in the last pass that wasn't silent
        self.numbers: set[int] = set()

    def changes(self, part: float) -> bool:
        """Whether the pass that ends has another part of the batch than the one before; it is
        the one before from now on.
        """
        before, self._part = self._part, part
        return before not in (None, part)

    def note(self, number: int, prior: Tensor | None, *, uneven: bool) -> None:
        """Note what p.grad held before a pass that is added to it.

        `uneven`: that pass has another weight.
        """
        if prior is None or not bool(prior.any()):
            self.numbers.discard(number)
        elif uneven:
            self.numbers.add(number)

    def find(self, parameters: Iterable[Any]) -> str | None:
        """Return the name of one of these parameters whose p.grad adds up passes of different
        weights, which it doesn't have any more.
        """
        for parameter in parameters if self.numbers else ():
            hook = self._hooks.get(id(parameter))
            if (
                hook is not None
                and hook.index in self.numbers
                and parameter.grad is not None
                and bool(parameter.grad.any())
            ):
                return hook.name
        return None

    def clear(self) -> None:
        """Forget all parameters."""
        self.numbers.clear()
