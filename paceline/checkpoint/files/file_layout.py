"""The layout of a snapshot as two files, planned first, so that bytes are copied once at most.

NAME.json          {"version": ..., "tree": ..., "tensors": ...}
                   "tensors" has notes on tensors that safetensors can't keep as they are
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

from paceline.checkpoint.files.disk import block
from paceline.errors import CheckpointError
from paceline.state.snapshot import Json, Snapshot, plain, raw

_LENGTH: Final = struct.Struct("<Q")
_ALIGNED: Final = 8  # bytes: where the tensors begin, and what the header is filled up to
NAMES: Final = {
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
    """One state on its way to the disk: `tree` is the content of the first file, `head` and the
    bytes of `tensors` that of the second.
    """

    tree: dict[str, Json]
    head: bytes
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the second file."""
        return len(self.head) + sum(tensor.nbytes for tensor in self.tensors)

    def parts(self) -> Iterator[Tensor]:
        """Yield the bytes of the second file, in order (1-D, uint8); tensors come from their
        device one by one.
        """
        if self.head:
            yield block(self.head)
        for tensor in self.tensors:
            yield raw(tensor)

    def hold(self, room: CopyMemory, number: int) -> FileLayout:
        """Copy all bytes into `room`, at the place `number`, in place of what it held; return
        the layout of the copy.
        """
        whole = room.place(number, self.nbytes)
        end = len(self.head)
        whole[:end].copy_(block(self.head))
        for tensor in self.tensors:
            begin, end = end, end + tensor.nbytes
            if begin < end:
                whole[begin:end].view(tensor.dtype).view(tensor.shape).copy_(
                    tensor, non_blocking=room.pinned
                )
        for device in {tensor.device for tensor in self.tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return FileLayout(self.tree, b"", (whole,))

    def dump(self) -> Tensor:
        """Pack all of it as one tensor of bytes, to be sent to another worker."""
        tree = json.dumps(self.tree).encode()
        whole = torch.empty(_LENGTH.size + len(tree) + self.nbytes, dtype=torch.uint8)
        end = 0
        for part in itertools.chain([block(_LENGTH.pack(len(tree)) + tree)], self.parts()):
            begin, end = end, end + part.nbytes
            whole[begin:end].copy_(part)
        return whole


def image(snapshot: Snapshot) -> FileLayout:
    """Lay `snapshot` out; its tensors stay where they are, and must not change before they are
    held or written.
    """
    tensors, notes = plain(snapshot.tensors)
    # so that each is aligned for its dtype
    order = sorted(tensors, key=lambda path: (-tensors[path].element_size(), path))
    tree = {"version": snapshot.version, "tree": snapshot.tree, "tensors": notes}
    return FileLayout(
        tree,
        header({path: tensors[path] for path in order}),
        tuple(tensors[path] for path in order),
    )


def received(whole: Tensor) -> FileLayout:
    """Read the tensor of `FileLayout.dump` from another worker."""
    data = whole.numpy().data
    (length,) = _LENGTH.unpack_from(data)
    begin = _LENGTH.size + length
    return FileLayout(json.loads(bytes(data[_LENGTH.size : begin])), b"", (whole[begin:],))


def header(tensors: Mapping[str, Tensor], *, notes: Mapping[str, str] | None = None) -> bytes:
    """Write the beginning of a file of safetensors, whose bytes follow in this order; `notes` is
    what such files say of themselves.

    Only dtypes and shapes are looked at: tensors may be on the device "meta".
    """
    entries: dict[str, Any] = {} if notes is None else {"__metadata__": dict(notes)}
    end = 0
    for path, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        entries[path] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNED)
    return _LENGTH.pack(len(text)) + text


class CopyMemory:
    """Memory for copies that is used again and again: most of the time of a copy to fresh memory
    goes into getting it.

    `pinned`: for copies from a GPU. Children that are forked don't have it, so that it needn't be
    copied once more after they were.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self.pinned = pinned
        self._places: dict[int, Tensor] = {}

    def place(self, number: int, nbytes: int) -> Tensor:
        """Return so many bytes at a place, with arbitrary content."""
        if number not in self._places or self._places[number].nbytes < nbytes:
            self._places.pop(number, None)  # before there are two
            self._places[number] = _pinned(nbytes) if self.pinned else _mapped(nbytes)
        return self._places[number][:nbytes]


def _pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _mapped(nbytes: int) -> Tensor:
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise CheckpointError(
            f"{nbytes / 1e6:.1f} MB for a copy of the state can't be had ({error.strerror}): "
            "save without background=True"
        ) from error
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with contextlib.suppress(OSError, AttributeError):  # not every system knows them
            memory.madvise(getattr(mmap, advice))
    return torch.frombuffer(memory, dtype=torch.uint8)
