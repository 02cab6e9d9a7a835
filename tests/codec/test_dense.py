from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from paceline.codec import dense, sparse
from paceline.codec.coding import make_message, split_message
from paceline.codec.dense import bfloat16, half, int4, int8, sign
from paceline.codec.sparse import topk
from paceline.errors import UsageError
from tests.harness.codings import data, sent


def levels_by_hand(x: list[float], block: int, top: int) -> list[float]:
    """The ten-line reference of int8 and int4: rounds half to even, as torch does."""
    found = []
    for start in range(0, len(x), block):
        piece = x[start : start + block]
        scale = max(map(abs, piece)) / top
        found += [round(value / scale) * scale for value in piece]
    return found


@pytest.mark.parametrize("numel", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize(
    ("coding", "top"), [(int8(block=64), 127), (int4(block=64), 7), (int4(block=6), 7)]
)
def test_levels(coding: int8 | int4, top: int, numel: int) -> None:
    x = data(numel)
    torch.testing.assert_close(
        sent(coding, x)[0], torch.tensor(levels_by_hand(x.tolist(), coding.block, top))
    )


@pytest.mark.parametrize("coding", [int8(), int4()], ids=repr)
def test_an_error_is_at_most_half_a_level(coding: int8 | int4) -> None:
    x = data(140_001) * torch.linspace(1e-20, 1e20, 140_001)
    error = (sent(coding, x)[0] - x).abs()
    for start in range(0, x.numel(), coding.block):
        block = slice(start, start + coding.block)
        assert float(error[block].max()) <= float(x[block].abs().max()) / coding.top * 0.5001


@pytest.mark.parametrize(
    "coding", [int8(rounding="stochastic"), int4(rounding="stochastic")], ids=repr
)
def test_stochastic_rounding_is_right_on_average(coding: int8 | int4) -> None:
    x = data(512)
    mean = torch.stack([sent(coding, x, seed)[0] for seed in range(2000)]).mean(0)
    level = float(x.abs().max()) / coding.top
    assert float((mean - x).abs().max()) < level * 0.5 / math.sqrt(2000) * 5
    nearest = sent(type(coding)(), x)[0]
    assert float((nearest - x).abs().max()) > level * 0.3, (
        "nearest rounding isn't: this test shows something"
    )
    assert float((sent(coding, x)[0] - x).abs().max()) <= level * 1.0001


@pytest.mark.parametrize("coding", [int8(), int4(), sign()], ids=repr)
def test_zeros_and_tiny_values(coding: int8) -> None:
    assert torch.equal(sent(coding, torch.zeros(3000))[0], torch.zeros(3000))
    tiny = torch.full((3000,), 1e-38)
    assert float(sent(coding, tiny)[0].abs().max()) <= 1.01e-38


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 1024, 1031, 140_003])
def test_signs(numel: int) -> None:
    x = data(numel)
    wanted = torch.cat(
        [torch.where(block < 0, -1.0, 1.0) * block.abs().mean() for block in x.split(64)]
    )
    torch.testing.assert_close(sent(sign(), x)[0], wanted)


def test_every_byte_of_signs() -> None:
    """All 256 patterns, packed and unpacked."""
    patterns = torch.tensor(
        [[1.0 if byte >> bit & 1 else -1.0 for bit in range(8)] for byte in range(256)]
    ).view(-1)
    out, whole = sent(sign(block=8), patterns)
    assert torch.equal(out, patterns)
    levels = split_message(sign(block=8), patterns.numel(), whole)[1]
    assert len(set(levels.tolist())) == 256


def test_half_keeps_what_is_too_large_finite() -> None:
    x = data(140_000)
    x[5], x[70_000], x[139_999] = 1e9, -70_000.0, 65_504.0
    out = sent(half(), x)[0]
    assert (out[5], out[70_000], out[139_999]) == (65_504, -65_504, 65_504)
    x[5] = x[70_000] = 0
    assert torch.equal(sent(half(), x)[0], x.half().float())
    assert torch.equal(sent(bfloat16(), x)[0], x.bfloat16().float())
    x[7], x[8], x[9] = math.inf, 1e9, -math.inf
    out = sent(half(), x)[0]
    assert (out[7], out[8], out[9]) == (math.inf, 65_504, -math.inf)


def test_levels_of_a_block_that_is_not_finite_touch_no_other() -> None:
    for coding in (int8(block=64), int4(block=64), sign(block=64)):
        x = data(640)
        wanted = sent(coding, x)[0]
        x[130] = math.nan
        out = sent(coding, x)[0]
        assert bool(out[128:192].isnan().all())
        assert torch.equal(out[:128], wanted[:128]) and torch.equal(out[192:], wanted[192:])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: int8(block=0), r"int8\(block=0\): block is 0; choose a multiple of 2"),
        (lambda: int4(block=3), "multiple of 2"),
        (lambda: sign(block=12), "multiple of 8"),
        (lambda: int8(rounding="up"), "rounding='up' is unknown; possible: nearest, stochastic"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments(make, says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match=says):
        make()


def test_a_block_of_levels_that_share_bytes_has_whole_bytes() -> None:
    class twobits(int4):
        packed = 4

    with pytest.raises(UsageError, match="block is 6; choose a multiple of 4"):
        twobits(block=6)
    assert twobits(block=8).block == 8


def test_inference_mode_and_no_gradients() -> None:
    x = data(3000).requires_grad_()
    with torch.no_grad():
        assert not sent(int8(), x.detach())[0].requires_grad
    with torch.inference_mode():
        whole, message = make_message(int8(), 3000)
        int8().encode(data(3000), message)
        assert whole.numel() == 3000 + 3 * 4


@pytest.mark.parametrize(
    "coding",
    [
        int8(),
        int8(block=30, rounding="stochastic"),
        int4(),
        int4(block=34, rounding="stochastic"),
        sign(),
        topk(0.01),
        topk(0.01, threshold="sampled"),
    ],
    ids=str,
)
@pytest.mark.parametrize("numel", [0, 1, 100, 300_001])
def test_c_and_torch_have_the_same_bits(
    coding: Any, numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    results = []
    for in_c in (True, False):
        for module in (dense, sparse):
            monkeypatch.setattr(module, "runs_in_c", lambda _, in_c=in_c: in_c)
        payload, message = make_message(coding, numel)
        coding.encode(x, message, torch.Generator().manual_seed(7))
        decoded, added = torch.empty(numel), x.clone()
        coding.decode(message, decoded)
        coding.add(message, added, minus=True)
        results.append([payload, decoded, added])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
