"""Blocks of tensors: the file and place of each rectangle of a logical tensor, as plain data.

A logical tensor is the tensor that one process would have. Workers that cut it keep rectangles of
it, and each rectangle is stored once. A box is the begin and end of a rectangle along each dim:

      0     4     8      columns
   0  +-----+-----+
      |  a  |  b  |      a  ((0, 3), (0, 4))  blocks-00000.safetensors
   3  +-----+-----+      b  ((0, 3), (4, 8))  blocks-00001.safetensors
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np
import torch

from paceline.errors import CheckpointError
from paceline.state.snapshot import DTYPES, Json

MOST_BLOCKS: Final = 1 << 15  # of a tensor
MOST_DIMS: Final = 64  # as torch has
# dtypes of whole bytes that memory can be made of
_DENSE: Final = re.compile(r"b?(float|complex|int|uint)(8|16|32|64|128)(_\w+)?|bool")
Box = tuple[tuple[int, int], ...]  # where a rectangle begins and ends along each dim


@dataclass(frozen=True)
class StoredBlock:
    """One rectangle of a logical tensor on disk: the tensor `key` in a file of safetensors."""

    box: Box
    file: str
    key: str


@dataclass(frozen=True)
class StoredTensor:
    """A logical tensor on the disk, in blocks that lie beside each other and cover it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: tuple[StoredBlock, ...]

    def overlapping(self, box: Box) -> Iterator[tuple[StoredBlock, Box]]:
        """Yield the blocks that have a part of `box`, each with that part."""
        for block in self.blocks:
            common = overlap(block.box, box)
            if common is not None:
                yield block, common


BlockIndex = dict[str, StoredTensor]  # by the path that a snapshot's tree refers to


def whole(shape: Sequence[int]) -> Box:
    """Return the box of all of a tensor."""
    return tuple((0, size) for size in shape)


def sizes(box: Box) -> tuple[int, ...]:
    """Return the shape of what is in a box."""
    return tuple(end - begin for begin, end in box)


def overlap(one: Box, other: Box) -> Box | None:
    """Intersection of two boxes, or None; a tensor without dims is in all of its boxes."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(begin < end for begin, end in common) else None


def within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Index of `inner` in a tensor that has the box `outer`."""
    return tuple(
        slice(begin - at, end - at) for (begin, end), (at, _) in zip(inner, outer, strict=True)
    )


def uncovered(shape: Sequence[int], boxes: Iterable[Box]) -> str:
    """Reason why boxes don't cover each element of this shape exactly once; empty if they do."""
    kept = sorted(box for box in boxes if prod(sizes(box)))
    frame = whole(shape)
    outside = [box for box in kept if overlap(box, frame) != box]
    if outside:
        return f"the block {outside[0]} is outside of {list(shape)}"
    edges = np.array(kept, dtype=np.int64).reshape(len(kept), len(frame), 2)
    first = [box[0][0] for box in kept if box]
    for place, box in enumerate(kept):
        # they are in the order of their first dim: no later one begins inside
        stop = bisect_left(first, box[0][1]) if box else len(kept)
        if len(later := edges[place + 1 : stop]):
            crossing = (later[..., 0] < edges[place, :, 1]) & (edges[place, :, 0] < later[..., 1])
            if len(found := np.flatnonzero(crossing.all(axis=1))):
                return f"the blocks {box} and {kept[place + 1 + int(found[0])]} overlap"
    there = sum(prod(sizes(box)) for box in kept)
    return "" if there == prod(shape) else f"its blocks have {there} of {prod(shape)} elements"


def merge(indexes: Iterable[Mapping[str, StoredTensor]]) -> BlockIndex:
    """Join the blocks that several workers have written of the same logical tensors.

    Raises `CheckpointError` if an element is missing or written twice.
    """
    parts: dict[str, list[StoredTensor]] = {}
    for index in indexes:
        for path, part in index.items():
            parts.setdefault(path, []).append(part)
    merged: BlockIndex = {}
    for path, same in parts.items():
        blocks = tuple(block for part in same for block in part.blocks)
        forms = {(part.dtype, part.shape) for part in same}
        why = (
            "workers have it in different shapes or dtypes"
            if len(forms) > 1
            else uncovered(same[0].shape, (b.box for b in blocks))
        )
        if why:
            raise CheckpointError(
                f"{path} can't be saved in blocks: {why}; please report it, "
                "with the mesh and the cuts"
            )
        merged[path] = StoredTensor(same[0].dtype, same[0].shape, blocks)
    return merged


def stored_bytes(index: Mapping[str, StoredTensor]) -> dict[str, int]:
    """Count the bytes of all blocks in each file."""
    counts: dict[str, int] = {}
    for tensor in index.values():
        for block in tensor.blocks:
            counts[block.file] = (
                counts.get(block.file, 0) + prod(sizes(block.box)) * tensor.dtype.itemsize
            )
    return counts


def to_json(index: Mapping[str, StoredTensor]) -> Json:
    """Write an index as JSON, for `from_json`."""
    return {
        path: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "blocks": [
                {
                    "file": block.file,
                    "key": block.key,
                    "box": [list(range_) for range_ in block.box],
                }
                for block in tensor.blocks
            ],
        }
        for path, tensor in index.items()
    }


def from_json(found: Json, *, partial: bool = False) -> BlockIndex:
    """Read an index that `to_json` wrote.

    Raises CheckpointError for anything else: nothing in a file is believed.

    With `partial` it may be that of one worker, in which tensors are not whole.
    """
    if not isinstance(found, dict):
        raise CheckpointError("an index of blocks is an object")
    index: BlockIndex = {}
    for path, entry in found.items():
        try:
            dtype, shape = form(entry["dtype"], entry["shape"])
            if len(entry["blocks"]) > MOST_BLOCKS:
                raise ValueError(
                    f"it is in {len(entry['blocks'])} blocks, and {MOST_BLOCKS} are possible"
                )
            blocks = tuple(
                StoredBlock(_box(block["box"]), _text(block["file"]), _text(block["key"]))
                for block in entry["blocks"]
            )
            tensor = StoredTensor(dtype, shape, blocks)
            why = "" if partial else uncovered(shape, (block.box for block in blocks))
        except (LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"what it says of {path} can't be read ({type(error).__name__}: {error})"
            ) from error
        if why:
            raise CheckpointError(f"{path} isn't there as a whole: {why}")
        index[path] = tensor
    return index


def form(dtype: Any, shape: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    """Read the dtype and shape of a tensor from untrusted input.

    Raises ValueError, TypeError or LookupError.
    """
    found = tuple(map(_count, shape))
    # torch counts strides of what is empty, too
    if len(found) > MOST_DIMS or prod(max(1, size) for size in found) >= 1 << 60:
        raise ValueError(f"no tensor has the shape {str(found)[:80]}")
    if not _DENSE.fullmatch(dtype):
        raise ValueError(f"no tensor that is kept is {dtype[:40]!r}")
    return DTYPES[dtype], found


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 60:
        raise ValueError(f"{repr(value)[:40]} is no size")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r} is no name")
    return value


def _box(value: Any) -> Box:
    return tuple((_count(begin), _count(end)) for begin, end in value)
