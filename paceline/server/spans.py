"""Spans of samples of an epoch: pieces of its global batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class SampleSpan(NamedTuple):
    """A part of a global batch: its number in the epoch, and samples `start` to `stop` of it."""

    batch: int
    start: int
    stop: int


Rows = list[list[int]]  # batch, first sample, and the one after the last


class SampleSpans:
    """A set of spans, in which adjacent ones of a batch are joined."""

    def __init__(self, rows: Iterable[Sequence[int]] = ()) -> None:
        self._of: dict[int, list[tuple[int, int]]] = {}
        self.add(rows)

    def add(self, rows: Iterable[Sequence[int]]) -> None:
        """Add these spans."""
        for batch, start, stop in rows:
            whole, apart = (start, stop), []
            for span in self._of.get(batch, ()):
                if span[1] < whole[0] or span[0] > whole[1]:
                    apart.append(span)
                else:
                    whole = min(span[0], whole[0]), max(span[1], whole[1])
            self._of[batch] = sorted([*apart, whole])

    def rows(self) -> Rows:
        """Return all spans, in order."""
        return [[batch, start, stop] for batch in sorted(self._of) for start, stop in self._of[batch]]

    def holes(self, first: int, sizes: Sequence[int]) -> Rows:
        """Return the samples outside these spans, of batches of these sizes, which have the numbers from `first` on."""
        found: Rows = []
        for batch, size in enumerate(sizes, first):
            place = 0
            for start, stop in [*self._of.get(batch, ()), (size, size)]:
                found += [[batch, place, start]] if start > place else []
                place = max(place, stop)
        return found
