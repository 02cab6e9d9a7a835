"""Garbage for the garbage collector."""

from __future__ import annotations

import gc
from typing import Any


def litter() -> None:
    """Leave garbage that only a search finds."""
    gc.disable()
    for _ in range(100_000):
        knot: list[Any] = []
        knot.append(knot)
    gc.enable()
