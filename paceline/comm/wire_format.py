"""The wire format of tensors: a form in the header, and frames of bytes. All input is checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.errors import PacelineError
from paceline.state.snapshot import view_as_tensor

DIMS = 16  # most dims of a tensor
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(
            torch.float64,
            torch.float32,
            torch.float16,
            torch.bfloat16,
            torch.complex64,
            torch.complex128,
        ),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


class MalformedMessage(PacelineError):
    """A message that no process of paceline has written. Its text says why."""


class TensorForm(NamedTuple):
    """Dtype and shape of a tensor, as a header has them."""

    name: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes of the tensor."""
        return math.prod(self.shape) * DTYPES[self.name].itemsize


def read_form(form: Any) -> TensorForm:
    """Read the form of a tensor from a header. Raises `MalformedMessage`."""
    if (
        not isinstance(form, list)
        or len(form) != 2
        or not isinstance(form[0], str)
        or form[0] not in DTYPES
    ):
        raise MalformedMessage("a tensor in its header has no dtype that is known")
    dtype, shape = form
    if (
        not isinstance(shape, list)
        or len(shape) > DIMS
        or any(type(length) is not int or length < 0 for length in shape)
    ):
        raise MalformedMessage("a tensor in its header has no shape")
    # Torch computes strides for empty tensors as well, so a dim of 0 must not hide a huge one.
    if math.prod(max(length, 1) for length in shape) >= 1 << 48:
        raise MalformedMessage("a tensor in its header is larger than any could be")
    return TensorForm(dtype, tuple(shape))


def cut_frames(memory: memoryview, frame: int | None) -> list[memoryview]:
    """Cut memory into frames of `frame` bytes, at least one. None: a single frame."""
    if frame is None or memory.nbytes <= frame:
        return [memory]
    return [memory[start : start + frame] for start in range(0, memory.nbytes, frame)]


def assemble_tensor(form: TensorForm, frames: Sequence[memoryview]) -> Tensor:
    """Make the tensor whose bytes are in `frames`. Raises `MalformedMessage`."""
    dtype, nbytes = DTYPES[form.name], sum(frame.nbytes for frame in frames)
    if form.nbytes != nbytes:
        raise MalformedMessage(
            f"a tensor {form.name}{list(form.shape)} needs {form.nbytes} bytes, and {nbytes} came"
        )
    if not nbytes:
        return torch.empty(form.shape, dtype=dtype)
    # A single frame that may be written to is the tensor's memory; others are put together.
    if len(frames) == 1 and not frames[0].readonly:
        return view_as_tensor(torch.frombuffer(frames[0], dtype=torch.uint8), dtype, form.shape)
    joined = torch.empty(nbytes, dtype=torch.uint8)
    memory, at = joined.numpy().data, 0
    for frame in frames:
        memory[at : at + frame.nbytes] = frame
        at += frame.nbytes
    return view_as_tensor(joined, dtype, form.shape)
