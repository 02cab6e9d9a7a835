"""The wire format of tensors: a form in the header and the frames behind it.

Nothing received is believed before it is checked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.errors import PacelineError
from paceline.state.snapshot import shaped

DIMS = 16  # of a tensor
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
    """A message that can't be meant for us; says why."""


class TensorForm(NamedTuple):
    """The dtype and shape of a tensor, as a header says them."""

    name: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes."""
        return math.prod(self.shape) * DTYPES[self.name].itemsize


def read(form: Any) -> TensorForm:
    """Read a tensor's form from a header. Raises `MalformedMessage`."""
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
    # torch counts strides of what is empty, too
    if math.prod(max(length, 1) for length in shape) >= 1 << 48:
        raise MalformedMessage("a tensor in its header is larger than any could be")
    return TensorForm(dtype, tuple(shape))


def cut(memory: memoryview, frame: int | None) -> list[memoryview]:
    """Cut memory into frames of so many bytes, at least one; None: one."""
    if frame is None or memory.nbytes <= frame:
        return [memory]
    return [memory[start : start + frame] for start in range(0, memory.nbytes, frame)]


def tensor(form: TensorForm, frames: Sequence[memoryview]) -> Tensor:
    """Make the tensor of that form which lies in these frames. Raises `MalformedMessage`."""
    dtype, came = DTYPES[form.name], sum(frame.nbytes for frame in frames)
    if form.nbytes != came:
        raise MalformedMessage(
            f"a tensor {form.name}{list(form.shape)} needs {form.nbytes} bytes, and {came} came"
        )
    if not came:
        return torch.empty(form.shape, dtype=dtype)
    if len(frames) == 1 and not frames[0].readonly:
        return shaped(torch.frombuffer(frames[0], dtype=torch.uint8), dtype, form.shape)
    whole = torch.empty(came, dtype=torch.uint8)
    memory, at = whole.numpy().data, 0
    for frame in frames:
        memory[at : at + frame.nbytes] = frame
        at += frame.nbytes
    return shaped(whole, dtype, form.shape)
