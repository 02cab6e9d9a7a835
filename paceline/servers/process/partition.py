"""The partition of a model over servers.

Large parameters are cut by rows, and all pieces are dealt to the servers by size:

parameters   | w0 ........................ | b0 | w1 ........ | b1 |
pieces       | w0[:400] | w0[400:800] | .. | b0 | w1[:400] ...| b1 |
servers           0            1         0    1      1           0       the largest first, each to
                                                                 the server that has least
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from paceline.comm.bucket_layout import BucketShape

# No piece is larger than this part of a server's share, so that all servers get about the same.
PIECES_PER_SERVER = 8
# In bytes. Smaller parameters are not cut.
MIN_CUT_BYTES = 64 << 10


class RowRange(NamedTuple):
    """Some rows (dim 0) of a parameter, or the whole parameter."""

    slot: int  # the parameter's number
    start: int
    stop: int
    shape: BucketShape  # of these rows
    whole: bool  # whether these are all rows

    @property
    def nbytes(self) -> int:
        """Bytes that the rows take."""
        return self.shape.numel * self.shape.dtype.itemsize


def cut_parameters(
    shapes: Sequence[BucketShape], servers: int, whole: Sequence[bool]
) -> list[RowRange]:
    """Cut parameters that have more bytes than the `PIECES_PER_SERVER`-th part of a server's share.

    Args:
        shapes: The parameters.
        servers: Number of servers.
        whole: By parameter: whether it may not be cut.

    Returns:
        All pieces, in the order of the parameters.
    """
    share = sum(shape.numel * shape.dtype.itemsize for shape in shapes) / max(servers, 1)
    limit = max(int(share / PIECES_PER_SERVER), MIN_CUT_BYTES)
    return [
        piece
        for slot, shape in enumerate(shapes)
        for piece in _cut_parameter(slot, shape, limit, whole=whole[slot])
    ]


def _cut_parameter(slot: int, shape: BucketShape, limit: int, *, whole: bool) -> Iterator[RowRange]:
    rows = shape.size[0] if shape.size else 1
    nbytes = shape.numel * shape.dtype.itemsize
    if whole or not shape.size or nbytes <= limit or rows < 2:
        yield RowRange(slot, 0, rows, shape, True)
        return
    rows_per_piece = max(limit * rows // nbytes, 1)
    for start in range(0, rows, rows_per_piece):
        stop = min(start + rows_per_piece, rows)
        yield RowRange(
            slot, start, stop, shape._replace(size=(stop - start, *shape.size[1:])), False
        )


def deal_pieces(pieces: Sequence[RowRange], servers: int) -> list[list[int]]:
    """Deal pieces to servers: the largest first, each to the server that has the fewest bytes.

    This is the LPT rule (Graham 1969).

    Returns:
        By server: the indices of its pieces, in rising order.
    """
    loads, dealt = [0] * servers, [list[int]() for _ in range(servers)]
    for index in sorted(range(len(pieces)), key=lambda index: (-pieces[index].nbytes, index)):
        server = min(range(servers), key=lambda server: (loads[server], server))
        loads[server] += pieces[index].nbytes
        dealt[server].append(index)
    return [sorted(numbers) for numbers in dealt]
