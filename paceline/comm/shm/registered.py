"""Registered memory: a region of the same length of every rank, mapped by all, so that tensors
there are reached without a copy.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from torch import Tensor


class RegisteredMemory(NamedTuple):
    """One piece of registered memory: a region of each rank."""

    number: int  # the same on all ranks
    start: int  # address of the first byte of my region
    regions: list[Tensor]  # uint8, one a rank

    @property
    def stop(self) -> int:
        """The address behind this rank's region."""
        return self.start + self.regions[0].numel()


class MemoryRegistry:
    """The registered memory of a group, and the plans made for tensors that lie there (`plans`,
    by what identifies them).
    """

    def __init__(self) -> None:
        self._made = 0
        self._places: dict[int, RegisteredMemory] = {}  # by where they start
        # where memory of my own starts, and ends, that stands in for such a place
        self._aside: dict[int, int] = {}
        self.plans: dict[Hashable, Any] = {}

    def add(self, start: int, regions: list[Tensor]) -> None:
        """Add a piece of memory in which this rank's region starts at this address; all ranks
        add theirs in the same order.
        """
        self._places[start] = RegisteredMemory(self._made, start, regions)
        self._made += 1

    def place(self, x: Tensor) -> RegisteredMemory | None:
        """Find the registered memory that `x` lies in."""
        if not self._places:
            return None
        address = x.data_ptr()
        place = self._places.get(address)
        if place is None:
            place = next(
                (p for p in tuple(self._places.values()) if p.start <= address < p.stop), None
            )
        return place

    def lay_aside(self, x: Tensor) -> None:
        """Note that `x` is memory of this rank alone, used as if it were registered."""
        self._aside[x.data_ptr()] = x.data_ptr() + x.numel() * x.element_size()

    def aside(self, x: Tensor) -> bool:
        """Whether `x` lies in memory of this rank alone that is used as if it were registered."""
        address = x.data_ptr()
        return (
            any(start <= address < stop for start, stop in self._aside.items())
            if self._aside
            else False
        )

    def forget(self, x: Tensor) -> None:
        """Forget the memory of `x`, which goes when its last tensor does."""
        if self._aside.pop(x.data_ptr(), None) is not None:
            return
        place = self.place(x)
        if place is not None:
            del self._places[place.start]
            self.plans.clear()

    def clear(self) -> None:
        """Forget all."""
        self._places.clear()
        self._aside.clear()
        self.plans.clear()
