"""Reads the version counter of a tensor, which shows changes in place.

`Tensor._version` is private by name only: torch's own error messages quote it, and its notes on
autograd describe it. This breaks if torch removes it; then changes in place would have to be found
by comparing values.
"""

from __future__ import annotations

from torch import Tensor


def version_of(tensor: Tensor) -> int | None:
    """Number of changes in place that torch has counted; None for an inference tensor."""
    return None if tensor.is_inference() else tensor._version
