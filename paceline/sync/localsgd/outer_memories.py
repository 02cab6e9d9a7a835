"""Outer optimizer state by name of the parameter, so that it survives a new layout.

    old units [a b] [c]  --take-->  by name a, b, c  --give-->  new units [q a] [b c]

Units change if parameters are unfrozen or added, and between checkpoints. The state of a parameter
without saved state (q) starts anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from paceline.sync.base import Slot
from paceline.sync.localsgd.fragment import FragmentUnit


class OuterMemories:
    """State of the parameters that are in no unit at present, by name."""

    def __init__(self) -> None:
        self._saved: dict[str, Tensor] = {}

    def save_units(self, units: Iterable[FragmentUnit], slots: Sequence[Slot]) -> None:
        """Save the state of these units, which are about to be replaced."""
        self._saved |= {name: view.clone() for name, view in _named_views(units, slots)}

    def restore_units(self, units: Iterable[FragmentUnit], slots: Sequence[Slot]) -> None:
        """Move the saved state of parameters into these units."""
        for name, view in _named_views(units, slots):
            saved = self._saved.pop(name, None)
            if saved is not None and saved.shape == view.shape:
                view.copy_(saved)

    def load_saved(self, found: Mapping[str, Tensor]) -> None:
        """Replace all saved state by that of a checkpoint."""
        self._saved = dict(found)

    def copy_all(self, units: Iterable[FragmentUnit], slots: Sequence[Slot]) -> dict[str, Tensor]:
        """Copy the state of all parameters, in units or saved here, by name."""
        return {**self._saved, **{name: view.clone() for name, view in _named_views(units, slots)}}


def has_memory_per_element(unit: FragmentUnit) -> bool:
    """Whether the outer optimizer keeps one number per element, so that parameters have parts."""
    return unit.memory is not None and unit.memory.shape == unit.start.shape


def _named_views(
    units: Iterable[FragmentUnit], slots: Sequence[Slot]
) -> Iterable[tuple[str, Tensor]]:
    """Yield the name of each parameter with outer optimizer state, and a view of that state."""
    for unit in units:
        if unit.memory is not None and has_memory_per_element(unit):
            for slot_index, view in zip(
                unit.bucket.members, unit.bucket.views_over(unit.memory), strict=True
            ):
                yield slots[slot_index].name, view
