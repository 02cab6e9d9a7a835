"""A message of tensors from one worker to another, and the header in which its shapes travel."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm.wire_format import MalformedMessage
from paceline.errors import UsageError

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
# whose bytes are their values
PLAIN = {dtype for name, dtype in DTYPES.items() if not name.startswith(("q", "bits"))}
LONGEST = 1 << 20  # bytes of a header
DIMS = 64  # of a tensor
LANES = 1 << 62


class PairMessage(NamedTuple):
    """What one worker has sent to another: a JSON value, and tensors that belong to the
    receiver.
    """

    head: Any
    tensors: tuple[Tensor, ...]


class TensorLayout(NamedTuple):
    """The dtype and shape of each tensor of a message, and its bytes."""

    forms: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    lengths: tuple[int, ...]


class PairHeader(NamedTuple):
    """What goes before the tensors of a message: its lane, its JSON value, and what its tensors
    are.
    """

    lane: int
    head: Any
    layout: TensorLayout


_encode = json.JSONEncoder(separators=(",", ":")).encode


def pack(lane: int, head: Mapping[str, Any], tensors: Sequence[Tensor]) -> bytes:
    """Write the header of a message. Raises `UsageError` for what can't be sent."""
    if not 0 <= lane < LANES:
        raise UsageError(f"lane {lane} is not one of 0..2**62 - 1: choose another number for it")
    for x in tensors:
        if x.layout != torch.strided or x.dtype not in PLAIN or x.is_meta:
            raise UsageError(
                f"a tensor of {x.dtype} ({x.layout}, on {x.device}) can't be sent: "
                "send dense tensors that have values"
            )
    try:
        said = _encode(head).encode()
    except (TypeError, ValueError, RecursionError) as error:
        text = (
            f"the head of a message is no JSON value ({error}): send tensors apart, and numbers, "
            "text, lists and maps here"
        )
        raise UsageError(text) from error
    header = b"%d\n%b\n%b" % (lane, _written(tuple((x.dtype, x.shape) for x in tensors)), said)
    if len(header) > LONGEST:
        raise UsageError(
            f"the header of a message takes {len(header)} bytes, and {LONGEST} are possible: "
            "send what is large as a tensor"
        )
    return header


@lru_cache(1024)  # the same tensors are sent again and again
def _written(forms: tuple[tuple[torch.dtype, torch.Size], ...]) -> bytes:
    return _encode(
        [[str(dtype).removeprefix("torch."), list(shape)] for dtype, shape in forms]
    ).encode()


def unpack(text: bytes) -> PairHeader:
    """Read a header. Raises `MalformedMessage` for what no worker has written."""
    try:
        lane, forms, said = text.split(b"\n", 2)
        return PairHeader(int(lane), json.loads(said.decode()), _read(forms))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise MalformedMessage(
            f"the header of a message makes no sense ({type(error).__name__}: {error})"
        ) from error


@lru_cache(1024)
def _read(text: bytes) -> TensorLayout:
    forms = tuple(_form(*form) for form in json.loads(text))
    return TensorLayout(forms, tuple(math.prod(shape) * dtype.itemsize for dtype, shape in forms))


def _form(name: str, shape: list[int]) -> tuple[torch.dtype, tuple[int, ...]]:
    dtype = DTYPES[name]
    if (
        dtype not in PLAIN
        or len(shape) > DIMS
        or any(type(length) is not int or length < 0 for length in shape)
    ):
        raise ValueError(f"a tensor of {name}{shape}")
    if math.prod(max(length, 1) for length in shape) >= 1 << 48:
        raise ValueError(f"a tensor of {shape}, larger than any could be")
    return dtype, tuple(shape)


def copied(x: Tensor) -> Tensor:
    """Return the values of a tensor in CPU memory of their own, contiguous."""
    with torch.inference_mode(False):
        return torch.empty(x.shape, dtype=x.dtype).copy_(x.detach())


def moved(message: PairMessage, device: torch.device) -> PairMessage:
    """Return the message with its tensors on a device."""
    if all(x.device == device for x in message.tensors):
        return message
    with torch.inference_mode(False):
        return message._replace(tensors=tuple(x.to(device) for x in message.tensors))
