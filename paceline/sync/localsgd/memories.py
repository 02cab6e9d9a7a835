"""State of outer optimizers for each parameter, by name.

It survives when parameters are unfrozen or added, and in checkpoints.

units before [a b] [c]    remembered a, b, c    units now [q a] [b c], where q starts anew
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from paceline.sync.base import Slot
from paceline.sync.localsgd.fragment import FragmentUnit


class OuterMemories:
    """What is remembered of parameters that lie in no unit at present, by their names."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, units: Iterable[FragmentUnit], slots: Sequence[Slot]) -> None:
        """Keep what units remember, which are about to be laid out anew."""
        self._kept |= {name: view.clone() for name, view in _views(units, slots)}

    def give(self, units: Iterable[FragmentUnit], slots: Sequence[Slot]) -> None:
        """Let units remember what is kept of their parameters."""
        for name, view in _views(units, slots):
            found = self._kept.pop(name, None)
            if found is not None and found.shape == view.shape:
                view.copy_(found)

    def load(self, found: Mapping[str, Tensor]) -> None:
        """Keep what a checkpoint has, in the place of all that is kept."""
        self._kept = dict(found)

    def known(self, units: Iterable[FragmentUnit], slots: Sequence[Slot]) -> dict[str, Tensor]:
        """Return all that is remembered, in units and beside them."""
        return {**self._kept, **{name: view.clone() for name, view in _views(units, slots)}}


def named(unit: FragmentUnit) -> bool:
    """Whether what an outer optimizer remembers of a unit is of each of its elements, and so of
    each parameter.
    """
    return unit.memory is not None and unit.memory.shape == unit.start.shape


def _views(units: Iterable[FragmentUnit], slots: Sequence[Slot]) -> Iterable[tuple[str, Tensor]]:
    """Yield the name of each parameter that an outer optimizer remembers something of, and that:
    an element for each of its own.
    """
    for unit in units:
        if unit.memory is not None and named(unit):
            for number, view in zip(
                unit.bucket.members, unit.bucket.views_over(unit.memory), strict=True
            ):
                yield slots[number].name, view
