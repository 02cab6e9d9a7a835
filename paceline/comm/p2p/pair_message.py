"""A message of tensors from one worker to another, and the header that describes its tensors.

header, three lines:   lane
                       [["float32", [2, 3]], ...]     dtype and shape of each tensor
                       head as JSON
"""

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
# Dtypes whose bytes are their values. Quantized ones have a scale besides.
PLAIN = {dtype for name, dtype in DTYPES.items() if not name.startswith(("q", "bits"))}
LONGEST = 1 << 20  # bytes of the longest header
DIMS = 64  # most dims of a tensor
LANES = 1 << 62  # number of lanes


class PairMessage(NamedTuple):
    """A message from another worker: a JSON value, and tensors that belong to the receiver."""

    head: Any
    tensors: tuple[Tensor, ...]


class TensorLayout(NamedTuple):
    """Dtype, shape and number of bytes of each tensor of a message."""

    forms: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    lengths: tuple[int, ...]


class PairHeader(NamedTuple):
    """The part of a message before its tensors: lane, JSON value, and layout of the tensors."""

    lane: int
    head: Any
    layout: TensorLayout


_encode = json.JSONEncoder(separators=(",", ":")).encode


def pack_header(lane: int, head: Mapping[str, Any], tensors: Sequence[Tensor]) -> bytes:
    """Write the header of a message. Raises `UsageError` if the message can't be sent."""
    if not 0 <= lane < LANES:
        raise UsageError(f"lane {lane} is not one of 0..2**62 - 1: choose another number for it")
    for x in tensors:
        if x.layout != torch.strided or x.dtype not in PLAIN or x.is_meta:
            raise UsageError(
                f"a tensor of {x.dtype} ({x.layout}, on {x.device}) can't be sent: "
                "send dense tensors that have values"
            )
    try:
        json_head = b"{}" if head == {} else _encode(head).encode()
    except (TypeError, ValueError, RecursionError) as error:
        text = (
            f"the head of a message is no JSON value ({error}): it holds numbers, text, lists and "
            "maps; send tensors beside it"
        )
        raise UsageError(text) from error
    header = b"%d\n%b\n%b" % (
        lane,
        _encode_forms(tuple((x.dtype, x.shape) for x in tensors)),
        json_head,
    )
    if len(header) > LONGEST:
        raise UsageError(
            f"the header of a message takes {len(header)} bytes, and at most {LONGEST} are "
            "possible: send large values as tensors"
        )
    return header


@lru_cache(1024)  # the same tensors are sent again and again
def _encode_forms(forms: tuple[tuple[torch.dtype, torch.Size], ...]) -> bytes:
    return _encode(
        [[str(dtype).removeprefix("torch."), list(shape)] for dtype, shape in forms]
    ).encode()


def unpack_header(text: bytes) -> PairHeader:
    """Read a header. Raises `MalformedMessage` if no worker can have written it."""
    try:
        lane, forms, json_head = text.split(b"\n", 2)
        # Most heads are empty.
        head = {} if json_head == b"{}" else json.loads(json_head.decode())
        return PairHeader(int(lane), head, _decode_forms(forms))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise MalformedMessage(
            f"the header of a message makes no sense ({type(error).__name__}: {error})"
        ) from error


@lru_cache(1024)
def _decode_forms(text: bytes) -> TensorLayout:
    forms = tuple(_decode_form(*form) for form in json.loads(text))
    return TensorLayout(forms, tuple(math.prod(shape) * dtype.itemsize for dtype, shape in forms))


def _decode_form(name: str, shape: list[int]) -> tuple[torch.dtype, tuple[int, ...]]:
    dtype = DTYPES[name]
    # The text comes from another process: check every size before memory is allocated for it.
    if (
        dtype not in PLAIN
        or len(shape) > DIMS
        or any(type(length) is not int or length < 0 for length in shape)
    ):
        raise ValueError(f"a tensor of {name}{shape}")
    if math.prod(max(length, 1) for length in shape) >= 1 << 48:
        raise ValueError(f"a tensor of {shape}, larger than any could be")
    return dtype, tuple(shape)


def copy_to_cpu(x: Tensor) -> Tensor:
    """Copy a tensor to contiguous CPU memory of its own."""
    with torch.inference_mode(False):
        return torch.empty(x.shape, dtype=x.dtype).copy_(x.detach())


def move_message(message: PairMessage, device: torch.device) -> PairMessage:
    """Move the tensors of a message to a device."""
    if all(x.device == device for x in message.tensors):
        return message
    with torch.inference_mode(False):
        return message._replace(tensors=tuple(x.to(device) for x in message.tensors))
