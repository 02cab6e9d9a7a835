"""Where the parameters of a unit lie in flat memory, of which each worker keeps one part, as plain
data.

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
    """Parameters of so many elements (`numels`), one behind the other in flat memory, of which
    each of `workers` has a part as long.
    """

    numels: tuple[int, ...]
    workers: int

    @cached_property
    def part(self) -> int:
        """The number of elements of each worker's part, padding included."""
        return -(-sum(self.numels) // self.workers)

    @property
    def padded(self) -> int:
        """The number of elements of the flat memory."""
        return self.part * self.workers

    def spans(self) -> list[Range]:
        """Return where each parameter lies in the flat memory."""
        return list(zip(accumulate(self.numels, initial=0), accumulate(self.numels), strict=False))

    def pieces(self, rank: int) -> list[Range]:
        """Return which elements of each parameter are in the part of a rank; start and stop are
        equal where none are.
        """
        first, last = rank * self.part, (rank + 1) * self.part
        return [
            (_within(first - start, stop - start), _within(last - start, stop - start))
            for start, stop in self.spans()
        ]

    def within(self, rank: int) -> list[Range]:
        """Return where the piece of each parameter lies in the part of a rank."""
        found = list[Range]()
        for (start, _), (first, last) in zip(self.spans(), self.pieces(rank), strict=True):
            at = _within(start + first - rank * self.part, self.part)
            found.append((at, at + last - first))
        return found


def _within(at: int, length: int) -> int:
    return min(max(at, 0), length)
