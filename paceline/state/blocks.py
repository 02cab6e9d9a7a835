"""Blocks of stored tensors: the file and place of each rectangle of a tensor, as plain data.

A logical tensor is the tensor that one process would have. Workers that cut it hold rectangles of
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

MAX_BLOCKS: Final = 1 << 15  # of one tensor
MAX_DIMS: Final = 64  # as in torch
# Dtypes whose elements are whole bytes. Others, such as quantized ones, can't be stored.
_STORABLE_DTYPES: Final = re.compile(r"b?(float|complex|int|uint)(8|16|32|64|128)(_\w+)?|bool")
Box = tuple[tuple[int, int], ...]  # begin and end of a rectangle along each dim


@dataclass(frozen=True)
class StoredBlock:
    """One rectangle of a logical tensor on disk: the tensor `key` in a file of safetensors."""

    box: Box
    file: str
    key: str


@dataclass(frozen=True)
class StoredTensor:
    """A logical tensor on disk, in blocks that cover it without overlap."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: tuple[StoredBlock, ...]

    def iterate_overlaps(self, box: Box) -> Iterator[tuple[StoredBlock, Box]]:
        """Yield the blocks that overlap a box, each with the box of the overlap."""
        for block in self.blocks:
            common = intersect_boxes(block.box, box)
            if common is not None:
                yield block, common


# Stored tensors by the paths that the tree of a snapshot refers to.
BlockIndex = dict[str, StoredTensor]


def whole_box(shape: Sequence[int]) -> Box:
    """Box of a whole tensor."""
    return tuple((0, size) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """Shape of the rectangle with this box."""
    return tuple(end - begin for begin, end in box)


def intersect_boxes(one: Box, other: Box) -> Box | None:
    """Intersect two boxes. None if they share no element. Boxes without dims share one element."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(begin < end for begin, end in common) else None


def slice_within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Slices that select the box `inner` from a tensor with the box `outer`."""
    return tuple(
        slice(begin - low, end - low) for (begin, end), (low, _) in zip(inner, outer, strict=True)
    )


def describe_coverage_error(shape: Sequence[int], boxes: Iterable[Box]) -> str:
    """Describe why boxes don't cover each element of a shape exactly once. Empty if they do."""
    nonempty = sorted(box for box in boxes if prod(box_shape(box)))
    frame = whole_box(shape)
    outside = [box for box in nonempty if intersect_boxes(box, frame) != box]
    if outside:
        return f"the block {outside[0]} is outside of {list(shape)}"
    # Boxes that are inside the shape and don't overlap cover it if they have as many elements. To
    # find overlaps, boxes are sorted by their begin along the first dim. Each is compared with the
    # later ones, up to the first that begins behind its end.
    edges = np.array(nonempty, dtype=np.int64).reshape(len(nonempty), len(frame), 2)
    first_begins = [box[0][0] for box in nonempty if box]
    for index, box in enumerate(nonempty):
        stop = bisect_left(first_begins, box[0][1]) if box else len(nonempty)
        if len(later := edges[index + 1 : stop]):
            crossing = (later[..., 0] < edges[index, :, 1]) & (edges[index, :, 0] < later[..., 1])
            if len(overlapping := np.flatnonzero(crossing.all(axis=1))):
                return f"the blocks {box} and {nonempty[index + 1 + int(overlapping[0])]} overlap"
    covered = sum(prod(box_shape(box)) for box in nonempty)
    return "" if covered == prod(shape) else f"its blocks have {covered} of {prod(shape)} elements"


def merge_indexes(indexes: Iterable[Mapping[str, StoredTensor]]) -> BlockIndex:
    """Merge the indexes of several workers, which have blocks of the same logical tensors.

    Raises `CheckpointError` if an element is missing or written twice.
    """
    # Collect the blocks of each tensor from all workers, then check that they fit together.
    entries_by_path: dict[str, list[StoredTensor]] = {}
    for index in indexes:
        for path, entry in index.items():
            entries_by_path.setdefault(path, []).append(entry)
    merged: BlockIndex = {}
    for path, entries in entries_by_path.items():
        blocks = tuple(block for entry in entries for block in entry.blocks)
        forms = {(entry.dtype, entry.shape) for entry in entries}
        why = (
            "workers have it in different shapes or dtypes"
            if len(forms) > 1
            else describe_coverage_error(entries[0].shape, (block.box for block in blocks))
        )
        if why:
            raise CheckpointError(
                f"{path} can't be saved in blocks: {why}; please report it, "
                "with the mesh and the cuts"
            )
        merged[path] = StoredTensor(entries[0].dtype, entries[0].shape, blocks)
    return merged


def count_stored_bytes(index: Mapping[str, StoredTensor]) -> dict[str, int]:
    """Count the bytes of all blocks in each file."""
    counts: dict[str, int] = {}
    for tensor in index.values():
        for block in tensor.blocks:
            counts[block.file] = (
                counts.get(block.file, 0) + prod(box_shape(block.box)) * tensor.dtype.itemsize
            )
    return counts


def index_to_json(index: Mapping[str, StoredTensor]) -> Json:
    """Convert an index to JSON, for `index_from_json`."""
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


def index_from_json(content: Json, *, partial: bool = False) -> BlockIndex:
    """Read an index from the JSON of `index_to_json`.

    The JSON may come from a damaged or hostile file, so everything in it is checked.

    Args:
        content: The parsed JSON.
        partial: Whether it may be the index of one worker, whose blocks don't cover their tensors.
            Default: False.

    Raises:
        CheckpointError: Anything in it is wrong.
    """
    if not isinstance(content, dict):
        raise CheckpointError(f"the index of blocks must be an object, not {type(content)}")
    index: BlockIndex = {}
    for path, entry in content.items():
        try:
            dtype, shape = parse_tensor_form(entry["dtype"], entry["shape"])
            # Checked before blocks are compared, which could take hours for a hostile file.
            if len(entry["blocks"]) > MAX_BLOCKS:
                raise ValueError(
                    f"it is in {len(entry['blocks'])} blocks, and at most {MAX_BLOCKS} are allowed"
                )
            blocks = tuple(
                StoredBlock(
                    _parse_box(block["box"]), _parse_name(block["file"]), _parse_name(block["key"])
                )
                for block in entry["blocks"]
            )
            tensor = StoredTensor(dtype, shape, blocks)
            why = "" if partial else describe_coverage_error(shape, (block.box for block in blocks))
        except (LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"its entry for {path} can't be read ({type(error).__name__}: {error})"
            ) from error
        if why:
            raise CheckpointError(f"{path} isn't complete: {why}")
        index[path] = tensor
    return index


def parse_tensor_form(dtype: Any, shape: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    """Read the dtype and shape of a tensor from untrusted input.

    Raises ValueError, TypeError or LookupError.
    """
    checked_shape = tuple(map(_parse_size, shape))
    # The product counts a size of 0 as 1: torch computes strides of empty tensors too, and they may
    # overflow as well.
    if len(checked_shape) > MAX_DIMS or prod(max(1, size) for size in checked_shape) >= 1 << 60:
        raise ValueError(f"no tensor has the shape {str(checked_shape)[:80]}")
    if not _STORABLE_DTYPES.fullmatch(dtype):
        raise ValueError(f"tensors of {dtype[:40]!r} can't be stored")
    return DTYPES[dtype], checked_shape


def _parse_size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 60:
        raise ValueError(f"{repr(value)[:40]} is not a size")
    return value


def _parse_name(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r} is not a name")
    return value


def _parse_box(value: Any) -> Box:
    return tuple((_parse_size(begin), _parse_size(end)) for begin, end in value)
