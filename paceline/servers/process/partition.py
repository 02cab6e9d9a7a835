"""The partition of a model over servers: parameters, cut by rows where they are large, dealt by
bytes.

parameters   | w0 ........................ | b0 | w1 ........ | b1 |
pieces       | w0[:400] | w0[400:800] | .. | b0 | w1[:400] ...| b1 |
servers           0            1         0    1      1           0       the largest first, each to
                                                                 the server that has least
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from paceline.comm.bucket_layout import BucketShape

# of what each server has: no piece is larger than one, so that all come to about the same
PARTS = 8
SMALLEST = 64 << 10  # bytes: smaller parameters are not cut


class RowRange(NamedTuple):
    """Some rows (dim 0) of a parameter; all of it where it has no rows, or may not be cut."""

    slot: int  # the parameter's number
    start: int
    stop: int
    shape: BucketShape  # of these rows
    whole: bool  # whether these are all

    @property
    def nbytes(self) -> int:
        """Bytes that the rows take."""
        return self.shape.numel * self.shape.dtype.itemsize


def pieces(shapes: Sequence[BucketShape], servers: int, whole: Sequence[bool]) -> list[RowRange]:
    """Return all parameters, cut where one is more than the `PARTS`-th part of what a server
    keeps; those that are `whole` are not.
    """
    share = sum(shape.numel * shape.dtype.itemsize for shape in shapes) / max(servers, 1)
    limit = max(int(share / PARTS), SMALLEST)
    return [
        piece
        for slot, shape in enumerate(shapes)
        for piece in _cut(slot, shape, limit, whole=whole[slot])
    ]


def _cut(slot: int, shape: BucketShape, limit: int, *, whole: bool) -> Iterator[RowRange]:
    rows = shape.size[0] if shape.size else 1
    nbytes = shape.numel * shape.dtype.itemsize
    if whole or not shape.size or nbytes <= limit or rows < 2:
        yield RowRange(slot, 0, rows, shape, True)
        return
    each = max(limit * rows // nbytes, 1)
    for start in range(0, rows, each):
        stop = min(start + each, rows)
        yield RowRange(
            slot, start, stop, shape._replace(size=(stop - start, *shape.size[1:])), False
        )


def deal(pieces: Sequence[RowRange], servers: int) -> list[list[int]]:
    """Deal pieces to servers, as numbers in rising order: the largest first, to the server that
    has least (LPT, Graham 1969).
    """
    loads, dealt = [0] * servers, [list[int]() for _ in range(servers)]
    for index in sorted(range(len(pieces)), key=lambda index: (-pieces[index].nbytes, index)):
        least = min(range(servers), key=lambda server: (loads[server], server))
        loads[least] += pieces[index].nbytes
        dealt[least].append(index)
    return [sorted(numbers) for numbers in dealt]
