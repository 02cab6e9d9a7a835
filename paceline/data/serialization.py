"""Serialization of plain values: indices, batches and states that travel between workers. Nothing is pickled.

None, bool, int, float, str, bytes, list, tuple, dict, numpy arrays and scalars, and tensors keep their types. Anything else
raises `DataError`, which names the type.
"""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor

from paceline.errors import DataError
from paceline.state.snapshot import DTYPES, byte_tensor

TUPLE, TENSOR, ARRAY, BIG, APART = 1, 2, 3, 4, 5
ALIGN = 64


def pack(value: Any, *, what: str = "this value", apart: list[Tensor] | None = None) -> bytes:
    """Write `value` as bytes; tensors are put into the list `apart`, where there is one, and are not in the bytes then."""

    def other(part: Any) -> msgpack.ExtType:
        if type(part) is tuple:
            return msgpack.ExtType(TUPLE, dumps(list(part)))
        if isinstance(part, Tensor):
            if apart is None:
                return msgpack.ExtType(TENSOR, _tensor_bytes(part))
            apart.append(part.detach())
            return msgpack.ExtType(APART, struct.pack("<I", len(apart) - 1))
        if isinstance(part, np.ndarray | np.generic) and part.dtype.kind in "biufc":
            shape = None if isinstance(part, np.generic) else list(part.shape)
            return msgpack.ExtType(ARRAY, msgpack.packb((part.dtype.str, shape, part.tobytes())))
        if type(part) is int:
            return msgpack.ExtType(BIG, str(part).encode())
        kind = f"{type(part).__module__}.{type(part).__qualname__}"
        raise DataError(
            f"{what} holds a {kind}, which can't be sent to another worker; possible are tensors, numpy arrays and scalars, "
            "dict, list, tuple, str, bytes, int, float, bool and None"
        )

    def dumps(part: Any) -> bytes:
        packed: bytes = msgpack.packb(part, default=other, strict_types=True)
        return packed

    return dumps(value)


def unpack(data: bytes, apart: list[Tensor] | None = None) -> Any:
    """Read the value that `pack` made `data` of; `apart` are the tensors that were kept out of it."""

    def other(code: int, body: bytes) -> Any:
        if code == TUPLE:
            return tuple(loads(body))
        if code == TENSOR:
            return _tensor(body)
        if code == ARRAY:
            kind, shape, content = msgpack.unpackb(body)
            array = np.frombuffer(content, dtype=kind).copy()
            return array[0] if shape is None else array.reshape(shape)
        if code == BIG:
            return int(body)
        assert code == APART and apart is not None
        return apart[struct.unpack("<I", body)[0]]

    def loads(body: bytes) -> Any:
        return msgpack.unpackb(body, ext_hook=other, strict_map_key=False)

    return loads(data)


def flatten(tensors: list[Tensor]) -> tuple[list[tuple[str, list[int]]], Tensor]:
    """Return the (dtype, shape) of each tensor, and all their bytes one after the other in one uint8 tensor, each at a multiple of 64."""
    heads = [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in tensors]
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    buffer = torch.empty(sum(_padded(size) for size in sizes), dtype=torch.uint8)
    start = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        buffer[start : start + size].copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
        start += _padded(size)
    return heads, buffer


def unflatten(heads: list[tuple[str, list[int]]], buffer: Tensor) -> list[Tensor]:
    """Return the tensors that `flatten` made `buffer` of: views of it."""
    tensors, start = [], 0
    for kind, shape in heads:
        dtype = DTYPES[kind]
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        tensors.append(buffer[start : start + size].view(dtype).reshape(shape))
        start += _padded(size)
    return tensors


def room(heads: list[tuple[str, list[int]]]) -> int:
    """Return the number of bytes of the buffer that `flatten` made."""
    return sum(_padded(int(np.prod(shape, dtype=np.int64)) * DTYPES[kind].itemsize) for kind, shape in heads)


def _padded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _tensor_bytes(tensor: Tensor) -> bytes:
    plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    body: bytes = msgpack.packb((str(tensor.dtype).removeprefix("torch."), list(tensor.shape), plain.numpy().tobytes()))
    return body


def _tensor(body: bytes) -> Tensor:
    kind, shape, content = msgpack.unpackb(body)
    plain = byte_tensor(content)
    return plain.view(DTYPES[kind]).reshape(shape)
