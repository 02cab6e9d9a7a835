"""The plan of a shard as bytes.

Bytes that are no plan are refused, and so is a plan that takes more memory than there is.
"""

from __future__ import annotations

import msgpack
import torch

from paceline.cluster.machine import read_memory
from paceline.comm.bucket_layout import BucketShape
from paceline.comm.wire_format import DTYPES
from paceline.errors import UsageError
from paceline.servers.process import codings
from paceline.servers.process.partition import RowRange
from paceline.servers.process.shard import ShardPlan


def pack_plan(plan: ShardPlan) -> bytes:
    """Convert a plan to bytes for a server."""
    piece_entries = [
        [
            piece.slot,
            piece.start,
            piece.stop,
            list(piece.shape.size),
            list(piece.shape.stride),
            str(piece.shape.dtype).removeprefix("torch."),
            piece.whole,
        ]
        for piece in plan.pieces
    ]
    owners, optimizers = (
        [list(owner) for owner in plan.piece_owners],
        [list(optimizer) for optimizer in plan.optimizers],
    )
    packed: bytes = msgpack.packb(
        [
            piece_entries,
            plan.unit_pieces,
            owners,
            optimizers,
            [codings.pack_phases(phases) for phases in plan.unit_phases],
        ]
    )
    return packed


def unpack_plan(packed: bytes) -> ShardPlan:
    """Make a plan from bytes.

    Raises `UsageError` for other bytes, or for a plan that takes more memory than there is.
    """
    try:
        piece_entries, runs, owners, optimizers, ways = msgpack.unpackb(packed)
        cpu = torch.device("cpu")
        pieces = [
            RowRange(
                slot,
                start,
                stop,
                BucketShape(tuple(size), tuple(stride), DTYPES[dtype], cpu),
                whole,
            )
            for slot, start, stop, size, stride, dtype, whole in piece_entries
        ]
        owner_pairs, optimizer_pairs = (
            [(optimizer, group) for optimizer, group in owners],
            [(name, entry) for name, entry in optimizers],
        )
        plan = ShardPlan(
            pieces,
            runs,
            owner_pairs,
            optimizer_pairs,
            [codings.unpack_phases(entry) for entry in ways],
        )
        nbytes = sum(_count_piece_bytes(piece) for piece in pieces)
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise UsageError(f"this is no plan of a server: {type(error).__name__}") from error
    free = read_memory()
    if free is not None and nbytes > free:
        raise UsageError(
            f"a server is to keep {nbytes:,} bytes of parameters, and its host has {free:,} bytes "
            "of memory left: use more servers, on more hosts (--servers)"
        )
    # Each piece has to be in exactly one unit.
    numbers = sorted(number for run in runs for number in run)
    if (
        numbers != list(range(len(pieces)))
        or len(owners) != len(pieces)
        or len(plan.unit_phases) != len(runs)
    ):
        raise UsageError("this is no plan of a server: pieces are missing in it")
    return plan


def _count_piece_bytes(piece: RowRange) -> int:
    """Count the bytes of a piece. Raises `ValueError` if its sizes and strides are invalid."""
    values = (piece.slot, piece.start, piece.stop, *piece.shape.size, *piece.shape.stride)
    if any(type(value) is not int or not 0 <= value < 1 << 48 for value in values) or len(
        piece.shape.size
    ) != len(piece.shape.stride):
        raise ValueError("a piece has sizes and strides")
    return piece.nbytes
