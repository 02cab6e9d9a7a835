"""Serializes plain values that workers send to each other: indices, batches and states.

Nothing is pickled.

None, bool, int, float, str, bytes, list, tuple, dict, numpy arrays and scalars, and tensors keep
their types. Anything else raises `DataError`, which names the type.
"""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor

from paceline.errors import DataError
from paceline.state.snapshot import DTYPES, copy_to_tensor

TUPLE, TENSOR, ARRAY, BIG = 1, 2, 3, 4


def pack_value(value: Any, *, what: str = "this value") -> bytes:
    """Convert a value to bytes.

    Args:
        value: The value.
        what: Its name in an error. Default: "this value".

    Raises:
        DataError: The value holds an object of another type.
    """

    # msgpack calls this for types that it doesn't know; tuples and big integers are among them.
    def pack_other(part: Any) -> msgpack.ExtType:
        if type(part) is tuple:
            return msgpack.ExtType(TUPLE, dumps(list(part)))
        if isinstance(part, Tensor):
            return msgpack.ExtType(TENSOR, _pack_tensor(part))
        if isinstance(part, np.ndarray | np.generic) and part.dtype.kind in "biufc":
            shape = None if isinstance(part, np.generic) else list(part.shape)
            return msgpack.ExtType(ARRAY, msgpack.packb((part.dtype.str, shape, part.tobytes())))
        if type(part) is int:
            return msgpack.ExtType(BIG, str(part).encode())
        kind = f"{type(part).__module__}.{type(part).__qualname__}"
        raise DataError(
            f"{what} holds a {kind}, which can't be sent to another worker: "
            "use tensors, numpy arrays and scalars, "
            "dict, list, tuple, str, bytes, int, float, bool and None"
        )

    def dumps(part: Any) -> bytes:
        packed: bytes = msgpack.packb(part, default=pack_other, strict_types=True)
        return packed

    return dumps(value)


def unpack_value(data: bytes) -> Any:
    """Convert packed bytes back to their value. Raises `ValueError` for other bytes."""

    def unpack_other(code: int, body: bytes) -> Any:
        if code == TUPLE:
            return tuple(loads(body))
        if code == TENSOR:
            return _unpack_tensor(body)
        if code == ARRAY:
            kind, shape, content = msgpack.unpackb(body)
            array = np.frombuffer(content, dtype=kind).copy()
            return array[0] if shape is None else array.reshape(shape)
        if code == BIG:
            return int(body)
        raise ValueError(f"a value has the unknown kind {code}")

    def loads(body: bytes) -> Any:
        return msgpack.unpackb(body, ext_hook=unpack_other, strict_map_key=False)

    return loads(data)


def _pack_tensor(tensor: Tensor) -> bytes:
    # As bytes, because numpy lacks some dtypes of torch, such as bfloat16.
    plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    body: bytes = msgpack.packb(
        (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), plain.numpy().tobytes())
    )
    return body


def _unpack_tensor(body: bytes) -> Tensor:
    kind, shape, content = msgpack.unpackb(body)
    plain = copy_to_tensor(content)
    return plain.view(DTYPES[kind]).reshape(shape)
