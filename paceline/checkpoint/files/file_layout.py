"""Plans the two files of a snapshot before they are written, so bytes are copied at most once.

NAME.json          {"version": ..., "tree": ..., "tensors": ...}
                   "tensors" has notes on tensors that safetensors can't store directly
NAME.safetensors   | length of the header | header | bytes of all tensors |
                   header: {"model/weight": {"dtype", "shape", "data_offsets"}, ...}
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from paceline.checkpoint.files.disk import to_byte_tensor
from paceline.errors import CheckpointError
from paceline.state.snapshot import Json, Snapshot, convert_dtypes, view_cpu_bytes

_LENGTH_FIELD: Final = struct.Struct("<Q")
_ALIGNMENT: Final = 8  # bytes; the header is padded to a multiple of it
SAFETENSORS_DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class FileLayout:
    """The two files of one state, before they are written.

    `tree` is the content of the first file. The second has `header`, then the bytes of `tensors`.
    """

    tree: dict[str, Json]
    header: bytes
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the second file."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)

    def iterate_bytes(self) -> Iterator[Tensor]:
        """Yield the bytes of the second file in order, as tensors (1-D, uint8, on the CPU).

        Tensors are copied from their device one by one.
        """
        if self.header:
            yield to_byte_tensor(self.header)
        for tensor in self.tensors:
            yield view_cpu_bytes(tensor)

    def copy_into(self, room: CopyMemory, number: int) -> FileLayout:
        """Copy all bytes into a block of memory. Returns the layout of the copy.

        Args:
            room: Memory for copies.
            number: Block of it, whose content is overwritten.
        """
        block_bytes = room.get_block(number, self.nbytes)
        end = len(self.header)
        block_bytes[:end].copy_(to_byte_tensor(self.header))
        for tensor in self.tensors:
            begin, end = end, end + tensor.nbytes
            if begin < end:
                block_bytes[begin:end].view(tensor.dtype).view(tensor.shape).copy_(
                    tensor, non_blocking=room.pinned
                )
        # Copies from a GPU to pinned memory are asynchronous. Wait for all of them.
        for device in {tensor.device for tensor in self.tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return FileLayout(self.tree, b"", (block_bytes,))

    def pack_bytes(self) -> Tensor:
        """Pack both files into one tensor of bytes, to be sent to another worker."""
        # | length of the tree | tree | bytes of the second file |
        tree = json.dumps(self.tree).encode()
        packed = torch.empty(_LENGTH_FIELD.size + len(tree) + self.nbytes, dtype=torch.uint8)
        end = 0
        for part in itertools.chain(
            [to_byte_tensor(_LENGTH_FIELD.pack(len(tree)) + tree)], self.iterate_bytes()
        ):
            begin, end = end, end + part.nbytes
            packed[begin:end].copy_(part)
        return packed


def lay_out_snapshot(snapshot: Snapshot) -> FileLayout:
    """Lay out `snapshot` as two files.

    Its tensors are not copied. They must not change before they are copied or written.
    """
    tensors, notes = convert_dtypes(snapshot.tensors)
    # The largest elements come first. So each tensor is aligned for its dtype.
    order = sorted(tensors, key=lambda path: (-tensors[path].element_size(), path))
    tree = {"version": snapshot.version, "tree": snapshot.tree, "tensors": notes}
    return FileLayout(
        tree,
        write_header({path: tensors[path] for path in order}),
        tuple(tensors[path] for path in order),
    )


def unpack_layout(packed: Tensor) -> FileLayout:
    """Unpack the result of `FileLayout.pack_bytes` from another worker."""
    data = packed.numpy().data
    (length,) = _LENGTH_FIELD.unpack_from(data)
    begin = _LENGTH_FIELD.size + length
    return FileLayout(json.loads(bytes(data[_LENGTH_FIELD.size : begin])), b"", (packed[begin:],))


def write_header(tensors: Mapping[str, Tensor], *, notes: Mapping[str, str] | None = None) -> bytes:
    """Write the header of a safetensors file. The bytes of `tensors` have to follow, in order.

    Only dtypes and shapes are used, so tensors may be on the device "meta". `notes` becomes the
    metadata of the file.
    """
    entries: dict[str, Any] = {} if notes is None else {"__metadata__": dict(notes)}
    end = 0
    for path, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        entries[path] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_FIELD.size + len(text)) % _ALIGNMENT)
    return _LENGTH_FIELD.pack(len(text)) + text


class CopyMemory:
    """Memory for copies that is reused, because most of the time of a copy goes into new memory.

    The memory consists of numbered blocks. Forked children don't inherit it (MADV_DONTFORK), so
    writing to it after a fork doesn't copy its pages.

    Args:
        pinned: Whether to use pinned memory, for copies from a GPU.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self.pinned = pinned
        self._blocks: dict[int, Tensor] = {}

    def get_block(self, number: int, nbytes: int) -> Tensor:
        """Get `nbytes` bytes of the block `number`, with arbitrary content."""
        if number not in self._blocks or self._blocks[number].nbytes < nbytes:
            # Free the old block first, so that there are never two of them.
            self._blocks.pop(number, None)
            self._blocks[number] = (
                _allocate_pinned(nbytes) if self.pinned else _allocate_mapped(nbytes)
            )
        return self._blocks[number][:nbytes]


def _allocate_pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _allocate_mapped(nbytes: int) -> Tensor:
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise CheckpointError(
            f"{nbytes / 1e6:.1f} MB for a copy of the state can't be allocated "
            f"({error.strerror}): save without background=True"
        ) from error
    # Not all systems have both kinds of advice.
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(getattr(mmap, advice))
    return torch.frombuffer(memory, dtype=torch.uint8)
