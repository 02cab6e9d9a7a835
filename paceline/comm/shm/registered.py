"""Registered memory: a region of every rank, mapped by all, so tensors in it need no copy.

    tensor of rank 0 at `start` + 8  ->  region of rank 0 + 8, region of rank 1 + 8, ...

All regions of a piece have the same length. A tensor lies at the same offset on every rank.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from torch import Tensor


class RegisteredMemory(NamedTuple):
    """One piece of registered memory: one region for each rank."""

    number: int  # the same on all ranks
    start: int  # address of the first byte of this rank's region
    regions: list[Tensor]  # uint8, one for each rank

    @property
    def stop(self) -> int:
        """Address behind the last byte of this rank's region."""
        return self.start + self.regions[0].numel()


class MemoryRegistry:
    """The registered memory of a group.

    `plans` holds the plans of tensors that lie there, by address, length and dtype.
    """

    def __init__(self) -> None:
        self._pieces_made = 0  # pieces so far; the same on all ranks, so a number names a piece
        self._places: dict[int, RegisteredMemory] = {}  # by start
        # Start and end of memory of this rank alone, used in place of a piece that others have.
        self._aside: dict[int, int] = {}
        self.plans: dict[Hashable, Any] = {}

    def add_memory(self, start: int, regions: list[Tensor]) -> None:
        """Add a piece. `start`: address of this rank's region. All ranks add in the same order."""
        self._places[start] = RegisteredMemory(self._pieces_made, start, regions)
        self._pieces_made += 1

    def find_place(self, x: Tensor) -> RegisteredMemory | None:
        """Find the piece that `x` lies in; None if it lies elsewhere."""
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
        """Use `x`, memory of this rank alone, in place of a piece that other ranks have."""
        self._aside[x.data_ptr()] = x.data_ptr() + x.numel() * x.element_size()

    def is_aside(self, x: Tensor) -> bool:
        """Whether `x` lies in memory that was laid aside by `lay_aside`."""
        address = x.data_ptr()
        return (
            any(start <= address < stop for start, stop in self._aside.items())
            if self._aside
            else False
        )

    def forget_memory(self, x: Tensor) -> None:
        """Forget the memory of `x`. It is freed with its last tensor."""
        if self._aside.pop(x.data_ptr(), None) is not None:
            return
        place = self.find_place(x)
        if place is not None:
            del self._places[place.start]
            self.plans.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._places.clear()
        self._aside.clear()
        self.plans.clear()
