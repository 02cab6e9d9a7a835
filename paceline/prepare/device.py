"""Moves batches to a worker's device without waiting for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def make_mover(device: torch.device) -> Callable[[Any], Any] | None:
    """Return a function that moves a batch to `device`; None where there is nothing to do.

    Tensors in dicts, lists, tuples and named tuples are moved, and objects with a method `to`
    (packed sequences, a user's batch class). From pinned memory (`pin_memory=True`) the copy
    overlaps with the processor's work; the training stream sees it in order.
    """
    if device.type == "cpu":
        return None

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device, non_blocking=True)
        if callable(getattr(value, "to", None)):
            return value.to(device)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(move, value))
        if type(value) in (list, tuple):
            return type(value)(map(move, value))
        if type(value) is dict:
            return {key: move(item) for key, item in value.items()}
        if isinstance(value, Mapping):
            return type(value)({key: move(item) for key, item in value.items()})  # type: ignore[call-arg]
        return value

    return move
