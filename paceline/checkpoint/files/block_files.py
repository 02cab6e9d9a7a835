"""Files of blocks: each worker writes rectangles of logical tensors; any rectangle can be read.

blocks.json                 each logical tensor: dtype, shape, and the file of each rectangle of it
blocks-00000.safetensors    the rectangles of one worker
tensors.safetensors         tensors that are not cut, each one block
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
from paceline.checkpoint.files.file_layout import NAMES, FileLayout, image
from paceline.errors import CheckpointError
from paceline.formatting import choices
from paceline.state.blocks import (
    BlockIndex,
    Box,
    StoredBlock,
    StoredTensor,
    form,
    overlap,
    sizes,
    whole,
    within,
)
from paceline.state.snapshot import SAFE, Snapshot, lift
from paceline.state.versioned import SHOWN

INDEX: Final = "blocks.json"
_STORED: Final = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True)
class LocalBlocks:
    """Rectangles of one logical tensor that this worker writes, with their places."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[tuple[Box, Tensor], ...]


@dataclass(frozen=True)
class BlocksLayout:
    """The file of one worker's blocks, planned; its tensors stay where they are until they are
    held or written.
    """

    file: str
    layout: FileLayout
    index: BlockIndex


def plan(number: int, tensors: Mapping[str, LocalBlocks]) -> BlocksLayout:
    """Lay out the file of worker `number`; rectangles without elements are left out."""
    file, kept, index = f"blocks-{number:05d}.safetensors", {}, {}
    for path, local in tensors.items():
        blocks: list[StoredBlock] = []
        for box, piece in local.pieces:
            assert tuple(piece.shape) == sizes(box), (path, box, piece.shape)
            if piece.numel():
                key = f"{path}@{len(blocks)}"
                kept[key] = piece
                blocks.append(StoredBlock(box, file, key))
        index[path] = StoredTensor(local.dtype, local.shape, tuple(blocks))
    return BlocksLayout(file, image(Snapshot(0, None, kept)), index)


class BlockReader:
    """Reads rectangles of the logical tensors in one checkpoint, and from the disk no more than
    those. Files stay open until `close`.

    `index` says which tensors there are. What lies in `folder` has been checked by hash, or isn't
    believed: what can't be read raises `CheckpointError` with the tensor and the file.
    """

    def __init__(self, folder: Path, index: Mapping[str, StoredTensor]) -> None:
        self.index = dict(index)
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._open = contextlib.ExitStack()

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        self._open.close()
        self._files.clear()

    def stored(self, name: str) -> StoredTensor:
        """Place of a tensor in the files.

        Raises `CheckpointError` with the nearest name if there is no such tensor.
        """
        if name not in self.index:
            raise CheckpointError(
                f"{self._folder.name} has no tensor {name!r}; {_near(name, self.index)}"
            )
        return self.index[name]

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Read a rectangle of a logical tensor (None: all of it) into new memory."""
        stored = self.stored(name)
        wanted = whole(stored.shape) if box is None else box
        if len(wanted) != len(stored.shape) or (
            0 not in sizes(wanted) and overlap(wanted, whole(stored.shape)) != wanted
        ):
            raise CheckpointError(
                f"{name} has the shape {list(stored.shape)} in {self._folder.name}; "
                f"{wanted} was asked of it"
            )
        out = torch.empty(sizes(wanted), dtype=stored.dtype)
        if out.numel():
            for block, common in stored.overlapping(wanted):
                out[within(common, wanted)].copy_(self._part(name, stored, block, common))
        return out

    def _part(self, name: str, stored: StoredTensor, block: StoredBlock, box: Box) -> Tensor:
        try:
            part = self._lifted(stored, block, box)
            if part.shape != sizes(box) or part.dtype != stored.dtype:
                raise CheckpointError(
                    f"it is {part.dtype}{list(part.shape)} there, {stored.dtype}{list(sizes(box))} "
                    "in the index"
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

    def _lifted(self, stored: StoredTensor, block: StoredBlock, box: Box) -> Tensor:
        file = self._file(block.file)
        part = within(box, block.box)
        dtype = str(stored.dtype).removeprefix("torch.")
        if dtype in SAFE:
            return (  # type: ignore[no-any-return]
                file.get_tensor(block.key) if box == block.box else file.get_slice(block.key)[part]
            )
        # bytes, or pairs of reals
        return lift({"": file.get_tensor(block.key)}, {"": [dtype, sizes(block.box)]})[""][part]

    def _file(self, name: str) -> Any:
        if name not in self._files:
            disk.opened(self._folder / name).close()  # no link, no pipe
            self._files[name] = self._open.enter_context(
                safetensors.safe_open(self._folder / name, "pt")
            )
        return self._files[name]


class LazyTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint by their path, each read when it is asked for, and not kept."""

    def __init__(self, reader: BlockReader) -> None:
        self._reader = reader

    def __getitem__(self, path: str) -> Tensor:
        return self._reader.read(path)

    def __contains__(self, path: object) -> bool:
        return path in self._reader.index

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader.index)

    def __len__(self) -> int:
        return len(self._reader.index)


def uncut(path: Path, notes: Mapping[str, list[Any]]) -> BlockIndex:
    """Read the header of a file in which each tensor is one block.

    Raises OSError, or what comes of a file that is none.
    """
    with disk.opened(path) as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > path.stat().st_size:
            raise ValueError(f"its header of {length} bytes is longer than the file")
        head = json.loads(file.read(length))
    index: BlockIndex = {}
    for key, entry in head.items():
        if key == "__metadata__":
            continue
        dtype, shape = form(
            *(
                notes[key]
                if key in notes
                else (str(_STORED[entry["dtype"]]).removeprefix("torch."), entry["shape"])
            )
        )
        index[key] = StoredTensor(dtype, shape, (StoredBlock(whole(shape), path.name, key),))
    return index


def logical(index: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Make tensors without memory in place of those of an index, for a snapshot of which single
    parts are read.
    """
    return {
        path: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for path, tensor in index.items()
    }


def _near(name: str, known: Collection[str]) -> str:
    """Write which names there are, or the nearest one of many."""
    if len(known) <= SHOWN:
        return choices(name, known)
    near = difflib.get_close_matches(name, known, n=1)
    return f"it has {len(known)} others" + (f"; did you mean {near[0]}?" if near else "")
