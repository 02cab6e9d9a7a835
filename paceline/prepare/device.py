"""Moves batches to a worker's device without waiting for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def make_mover(device: torch.device) -> Callable[[Any], Any] | None:
    """Make a function that moves a batch to `device`; None if batches are there already (CPU).

    It moves tensors in dicts, lists, tuples and named tuples, and objects with a method `to`
    (packed sequences, a user's batch class). A copy from pinned memory (`pin_memory=True`) overlaps
    with work of the CPU. Kernels that use the batch come after it on the same CUDA stream.
    """
    if device.type == "cpu":
        return None

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device, non_blocking=True)
        if callable(getattr(value, "to", None)):
            return value.to(device)
        # A named tuple takes its fields as separate arguments, other tuples take one iterable.
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(move, value))
        # Subclasses of list and tuple may have any constructor, so they stay as they are.
        if type(value) in (list, tuple):
            return type(value)(map(move, value))
        if type(value) is dict:
            return {key: move(item) for key, item in value.items()}
        if isinstance(value, Mapping):
            return type(value)({key: move(item) for key, item in value.items()})  # type: ignore[call-arg]
        return value

    return move
