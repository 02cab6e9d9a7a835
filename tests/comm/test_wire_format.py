"""A tensor comes back from its form and its frames bit for bit, and nothing that was received is
believed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.comm.wire_format import (
    DTYPES,
    MalformedMessage,
    TensorForm,
    assemble_tensor,
    cut_frames,
    read_form,
)


def frames(x: torch.Tensor, frame: int | None) -> list[memoryview]:
    return cut_frames(memoryview(x.reshape(-1).view(torch.uint8).numpy().tobytes()), frame)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("frame", [None, 1, 7, 1 << 16])
def test_every_dtype_comes_back(name: str, frame: int | None) -> None:
    x = torch.arange(12).reshape(3, 4).to(DTYPES[name])
    form = read_form([name, [3, 4]])
    assert form.nbytes == x.nbytes
    back = assemble_tensor(form, frames(x, frame))
    assert back.dtype == x.dtype and torch.equal(back, x)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
def test_scalars_and_empty_tensors(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    assert torch.equal(
        assemble_tensor(read_form(["float32", list(shape)]), frames(x, None) if x.numel() else []),
        x,
    )


def test_frames_have_at_most_so_many_bytes() -> None:
    assert [len(part) for part in cut_frames(memoryview(bytes(10)), 4)] == [4, 4, 2]
    assert [len(part) for part in cut_frames(memoryview(bytes(10)), None)] == [10]
    assert [len(part) for part in cut_frames(memoryview(b""), 4)] == [0]


@pytest.mark.parametrize(
    "form",
    [
        *(None, [], ["float32"], ["float99", [1]], [3, [1]], ["float32", [1], 2]),
        *(
            ["float32", 4],
            ["float32", [-1]],
            ["float32", [1.0]],
            ["float32", [True]],
            ["float32", [1] * 17],
        ),
        *(["float32", [1 << 48]], ["float32", [1 << 24, 1 << 24]], ["float32", [0, 1 << 50]]),
    ],
    ids=str,
)
def test_forms_that_no_tensor_has(form: Any) -> None:
    with pytest.raises(MalformedMessage, match="a tensor in its header"):
        read_form(form)


def test_too_few_or_too_many_bytes_are_refused() -> None:
    for nbytes in (11, 13, 0):
        with pytest.raises(MalformedMessage, match="needs 12 bytes"):
            assemble_tensor(TensorForm("float32", (3,)), [memoryview(bytes(nbytes))])
