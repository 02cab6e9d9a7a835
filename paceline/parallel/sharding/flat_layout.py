"""The layout of flat memory as plain data: where a unit's parameters and the workers' parts lie.

parameters    weight, 7 elements      bias, 3 elements    padding
flat memory   w0 w1 w2 w3 w4 w5 w6    b0 b1 b2            -- --       4 workers, parts of 3 elements
rank 0        w0 w1 w2
rank 1                 w3 w4 w5
rank 2                          w6    b0 b1
rank 3                                      b2            -- --
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from paceline.parallel.placement import Range


@dataclass(frozen=True)
class FlatLayout:
    """Parameters of `numels` elements, one behind the other, cut into equal parts for `workers`."""

    numels: tuple[int, ...]
    workers: int

    @cached_property
    def part_numel(self) -> int:
        """Number of elements of each worker's part, with padding."""
        return -(-sum(self.numels) // self.workers)

    @property
    def padded_numel(self) -> int:
        """Number of elements of the flat memory, with padding."""
        return self.part_numel * self.workers

    def parameter_ranges(self) -> list[Range]:
        """Range of each parameter in the flat memory."""
        return list(zip(accumulate(self.numels, initial=0), accumulate(self.numels), strict=False))

    def piece_ranges(self, rank: int) -> list[Range]:
        """Range of each parameter's elements in a rank's part; empty ranges if it has none."""
        first, last = rank * self.part_numel, (rank + 1) * self.part_numel
        return [
            (_clamp(first - start, stop - start), _clamp(last - start, stop - start))
            for start, stop in self.parameter_ranges()
        ]

    def part_ranges(self, rank: int) -> list[Range]:
        """Range in a rank's part that the piece of each parameter takes."""
        ranges = list[Range]()
        for (start, _), (first, last) in zip(
            self.parameter_ranges(), self.piece_ranges(rank), strict=True
        ):
            at = _clamp(start + first - rank * self.part_numel, self.part_numel)
            ranges.append((at, at + last - first))
        return ranges


def _clamp(at: int, length: int) -> int:
    return min(max(at, 0), length)
