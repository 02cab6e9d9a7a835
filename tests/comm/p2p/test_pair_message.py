from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.comm.p2p.pair_message import DTYPES, PLAIN, pack_header, unpack_header
from paceline.comm.wire_format import MalformedMessage
from paceline.errors import UsageError


@pytest.mark.parametrize("name", sorted(name for name, dtype in DTYPES.items() if dtype in PLAIN))
def test_a_header_has_every_dtype(name: str) -> None:
    head = {"a": [1, None, "b", 0.5, {"c": True}]}
    tensors = [torch.empty((3, 0, 2), dtype=DTYPES[name]), torch.empty((), dtype=DTYPES[name])]
    lane, came, layout = unpack_header(pack_header(7, head, tensors))
    assert (lane, came) == (7, head)
    assert layout.forms == ((DTYPES[name], (3, 0, 2)), (DTYPES[name], ()))
    assert layout.lengths == (0, DTYPES[name].itemsize)


@pytest.mark.parametrize(
    ("lane", "head", "tensor", "said"),
    [
        (-1, {}, torch.ones(1), "lane -1"),
        (0, {"a": torch.ones(1)}, torch.ones(1), "no JSON value"),
        (0, {"a": "x" * (1 << 20)}, torch.ones(1), "send large values as tensors"),
        (0, {}, torch.ones(2, 2).to_sparse(), "send dense tensors"),
        (0, {}, torch.ones(2, device="meta"), "send dense tensors"),
    ],
)
def test_what_cannot_be_sent_is_refused(
    lane: int, head: Any, tensor: torch.Tensor, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        pack_header(lane, head, [tensor])


@pytest.mark.parametrize(
    "text",
    [
        *(
            b"",
            b"\xff",
            b"3",
            b"0\n[]",
            b"a\n[]\n{}",
            b"0\n[]\n",
            b"0\n[]\n{",
            b"0\n3\n{}",
            b"0\n[3]\n{}",
            b"0\n[[1,2]]\n{}",
        ),
        *(
            b'0\n[["float32",[-1]]]\n{}',
            b'0\n[["qint8",[1]]]\n{}',
            b'0\n[["nn",[1]]]\n{}',
            b'0\n[["float32",[1.5]]]\n{}',
        ),
        *(
            b'0\n[["float32",[true]]]\n{}',
            b'0\n[["float32",[1073741824,1073741824]]]\n{}',
            b"0\n" + b"[" * 99_999,
            b"0\n[]\n" + b"[" * 99_999,
        ),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(text: bytes) -> None:
    with pytest.raises(MalformedMessage):
        unpack_header(text)
