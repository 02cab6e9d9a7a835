"""How the plan of a shard travels: as bytes, and what is no plan, or takes more memory than
there is, is refused.
"""

from __future__ import annotations

import msgpack
import torch

from paceline.cluster.machine import memory
from paceline.comm.bucket_layout import BucketShape
from paceline.comm.wire_format import DTYPES
from paceline.errors import UsageError
from paceline.servers.process import codings
from paceline.servers.process.partition import RowRange
from paceline.servers.process.shard import ShardPlan


def write(plan: ShardPlan) -> bytes:
    """Write a plan as bytes that a server reads."""
    cut = [
        [
            p.slot,
            p.start,
            p.stop,
            list(p.shape.size),
            list(p.shape.stride),
            str(p.shape.dtype).removeprefix("torch."),
            p.whole,
        ]
        for p in plan.pieces
    ]
    owners, optimizers = (
        [list(owner) for owner in plan.owners],
        [list(found) for found in plan.optimizers],
    )
    packed: bytes = msgpack.packb(
        [cut, plan.runs, owners, optimizers, [codings.put(ways) for ways in plan.ways]]
    )
    return packed


def read(packed: bytes) -> ShardPlan:
    """Read a plan that was written.

    Raises `UsageError` for bytes that are none, or for more than there is memory for.
    """
    try:
        cut, runs, owners, optimizers, ways = msgpack.unpackb(packed)
        cpu = torch.device("cpu")
        pieces = [
            RowRange(slot, start, stop, BucketShape(tuple(s), tuple(t), DTYPES[dtype], cpu), whole)
            for slot, start, stop, s, t, dtype, whole in cut
        ]
        owned, recipes = (
            [(optimizer, group) for optimizer, group in owners],
            [(name, found) for name, found in optimizers],
        )
        plan = ShardPlan(pieces, runs, owned, recipes, [codings.take(found) for found in ways])
        nbytes = sum(_size(piece) for piece in pieces)
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise UsageError(f"this is no plan of a server: {type(error).__name__}") from error
    free = memory()
    if free is not None and nbytes > free:
        raise UsageError(
            f"a server is to keep {nbytes:,} bytes of parameters, and its host has {free:,} bytes "
            "of memory left: use more servers, on more hosts (--servers)"
        )
    numbers = sorted(number for run in runs for number in run)
    if (
        numbers != list(range(len(pieces)))
        or len(owners) != len(pieces)
        or len(plan.ways) != len(runs)
    ):
        raise UsageError("this is no plan of a server: pieces are missing in it")
    return plan


def _size(piece: RowRange) -> int:
    """Return the number of bytes that a piece takes; raises `ValueError` for one that has no
    size.
    """
    numbers = (piece.slot, piece.start, piece.stop, *piece.shape.size, *piece.shape.stride)
    if any(type(number) is not int or not 0 <= number < 1 << 48 for number in numbers) or len(
        piece.shape.size
    ) != len(piece.shape.stride):
        raise ValueError("a piece has sizes and strides")
    return piece.nbytes
