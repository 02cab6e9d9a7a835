"""Writes blocks of logical tensors to one file per worker, and reads any rectangle from them.

A logical tensor is a tensor as it would be without cuts. A block is a stored rectangle of one.

blocks.json                 each logical tensor: dtype, shape, and the file of each of its blocks
blocks-00000.safetensors    the blocks of one worker
tensors.safetensors         tensors that are not cut, one block each
"""

from __future__ import annotations

import contextlib
import difflib
import json
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import safetensors
import torch
from torch import Tensor

from paceline.checkpoint.files import disk
from paceline.checkpoint.files.file_layout import SAFETENSORS_DTYPES, FileLayout, lay_out_snapshot
from paceline.errors import CheckpointError
from paceline.formatting import format_choices
from paceline.state.blocks import (
    BlockIndex,
    Box,
    StoredBlock,
    StoredTensor,
    box_shape,
    intersect_boxes,
    parse_tensor_form,
    slice_within,
    whole_box,
)
from paceline.state.snapshot import SAFE_DTYPES, Snapshot, restore_dtypes
from paceline.state.versioned import MAX_SHOWN_DIFFERENCES

INDEX_FILE: Final = "blocks.json"
_DTYPES_BY_NAME: Final = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True)
class LocalBlocks:
    """The rectangles of one logical tensor that this worker writes, with their places."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: tuple[tuple[Box, Tensor], ...]


@dataclass(frozen=True)
class BlocksLayout:
    """Plan of the file of one worker's blocks. No tensor is copied before it is written."""

    file: str
    layout: FileLayout
    index: BlockIndex


def lay_out_blocks(number: int, tensors: Mapping[str, LocalBlocks]) -> BlocksLayout:
    """Plan the file of blocks of a worker. Rectangles without elements are left out.

    Args:
        number: Rank of the worker, for the name of the file.
        tensors: Rectangles that this worker writes, by the path of their logical tensor.
    """
    file, stored_pieces, index = f"blocks-{number:05d}.safetensors", {}, {}
    for path, local_blocks in tensors.items():
        blocks: list[StoredBlock] = []
        for box, piece in local_blocks.blocks:
            assert tuple(piece.shape) == box_shape(box), (path, box, piece.shape)
            if piece.numel():
                key = f"{path}@{len(blocks)}"
                stored_pieces[key] = piece
                blocks.append(StoredBlock(box, file, key))
        index[path] = StoredTensor(local_blocks.dtype, local_blocks.shape, tuple(blocks))
    return BlocksLayout(file, lay_out_snapshot(Snapshot(0, None, stored_pieces)), index)


class BlockReader:
    """Reads rectangles of the logical tensors in one checkpoint, and no other bytes.

    Files stay open until `close`. A block that can't be read raises `CheckpointError` with the
    tensor and the file. So the files needn't be trusted, even if their hashes weren't checked.

    Args:
        folder: Folder of the checkpoint.
        index: The tensors in it, by path.
    """

    def __init__(self, folder: Path, index: Mapping[str, StoredTensor]) -> None:
        self.index = dict(index)
        self._folder = folder
        self._open_files: dict[str, Any] = {}
        self._exit_stack = contextlib.ExitStack()

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        self._exit_stack.close()
        self._open_files.clear()

    def get_stored_tensor(self, name: str) -> StoredTensor:
        """Get the shape of a tensor and the places of its blocks.

        Raises `CheckpointError`, with the nearest name, if there is no such tensor.
        """
        if name not in self.index:
            raise CheckpointError(
                f"{self._folder.name} has no tensor {name!r}; {_describe_names(name, self.index)}"
            )
        return self.index[name]

    def read_rectangle(self, name: str, box: Box | None = None) -> Tensor:
        """Read a rectangle of a logical tensor (None: all of it) into new memory."""
        # An empty rectangle may lie anywhere. Any other must be inside the tensor.
        stored = self.get_stored_tensor(name)
        wanted = whole_box(stored.shape) if box is None else box
        if len(wanted) != len(stored.shape) or (
            0 not in box_shape(wanted)
            and intersect_boxes(wanted, whole_box(stored.shape)) != wanted
        ):
            raise CheckpointError(
                f"{name} has the shape {list(stored.shape)} in {self._folder.name}; "
                f"the rectangle {wanted} is not inside that shape"
            )
        # Assemble the rectangle from the parts of all blocks that overlap it.
        result = torch.empty(box_shape(wanted), dtype=stored.dtype)
        if result.numel():
            for block, overlap_box in stored.iterate_overlaps(wanted):
                result[slice_within(overlap_box, wanted)].copy_(
                    self._read_block_part(name, stored, block, overlap_box)
                )
        return result

    def _read_block_part(
        self, name: str, stored: StoredTensor, block: StoredBlock, box: Box
    ) -> Tensor:
        """Read the part of a block that lies in `box`, and check its shape and dtype."""
        # The index and the file may contradict each other, so the part is compared with the index.
        try:
            part = self._load_block_part(stored, block, box)
            if part.shape != box_shape(box) or part.dtype != stored.dtype:
                raise CheckpointError(
                    f"it is {part.dtype}{list(part.shape)} there, "
                    f"{stored.dtype}{list(box_shape(box))} in the index"
                )
        except (
            OSError,
            ValueError,
            LookupError,
            RuntimeError,
            safetensors.SafetensorError,
            CheckpointError,
        ) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"{name} can't be read from {block.file} in {self._folder.name}: {reason}"
            ) from error
        return part

    def _load_block_part(self, stored: StoredTensor, block: StoredBlock, box: Box) -> Tensor:
        file = self._open_file(block.file)
        slices = slice_within(box, block.box)
        dtype = str(stored.dtype).removeprefix("torch.")
        if dtype in SAFE_DTYPES:
            return (  # type: ignore[no-any-return]
                file.get_tensor(block.key)
                if box == block.box
                else file.get_slice(block.key)[slices]
            )
        # Other dtypes are stored as bytes, or complex ones as pairs of reals. A slice of these is
        # not a slice of the tensor, so all of the block is read.
        return restore_dtypes(
            {"": file.get_tensor(block.key)}, {"": [dtype, box_shape(block.box)]}
        )[""][slices]

    def _open_file(self, name: str) -> Any:
        if name not in self._open_files:
            # safetensors opens any path. This raises for links and pipes.
            disk.open_plain_file(self._folder / name).close()
            self._open_files[name] = self._exit_stack.enter_context(
                safetensors.safe_open(self._folder / name, "pt")
            )
        return self._open_files[name]


class LazyTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint by path. Each access reads the tensor again."""

    def __init__(self, reader: BlockReader) -> None:
        self._reader = reader

    def __getitem__(self, path: str) -> Tensor:
        return self._reader.read_rectangle(path)

    def __contains__(self, path: object) -> bool:
        return path in self._reader.index

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader.index)

    def __len__(self) -> int:
        return len(self._reader.index)


def read_uncut_index(path: Path, notes: Mapping[str, list[Any]]) -> BlockIndex:
    """Read the header of a safetensors file in which each tensor is one block.

    `notes` has the dtypes and shapes of tensors that safetensors can't store directly. Raises
    OSError, or one of `UNREADABLE` and `struct.error` if the file has another form.
    """
    # A safetensors file begins with the length of its header, which is JSON.
    with disk.open_plain_file(path) as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > path.stat().st_size:
            raise ValueError(f"its header of {length} bytes is longer than the file")
        header = json.loads(file.read(length))
    index: BlockIndex = {}
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        dtype, shape = parse_tensor_form(
            *(
                notes[key]
                if key in notes
                else (str(_DTYPES_BY_NAME[entry["dtype"]]).removeprefix("torch."), entry["shape"])
            )
        )
        index[key] = StoredTensor(dtype, shape, (StoredBlock(whole_box(shape), path.name, key),))
    return index


def make_meta_tensors(index: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Make a tensor without memory (on the device "meta") for each tensor of an index."""
    return {
        path: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for path, tensor in index.items()
    }


def _describe_names(name: str, names: Collection[str]) -> str:
    """Describe the names that exist, or the nearest one if there are many."""
    if len(names) <= MAX_SHOWN_DIFFERENCES:
        return format_choices(name, names)
    close_names = difflib.get_close_matches(name, names, n=1)
    return f"it has {len(names)} others" + (
        f"; did you mean {close_names[0]}?" if close_names else ""
    )
