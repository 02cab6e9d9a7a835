from __future__ import annotations

import itertools

import pytest
import torch

from paceline.codec.coding import (
    Coding,
    WirePart,
    compose,
    count_message_bytes,
    cut_spans,
    exact,
    make_message,
    split_message,
)
from paceline.codec.dense import bfloat16, half, int4, int8, sign
from paceline.codec.sparse import randomk, topk
from paceline.errors import UsageError
from paceline.servers.process.codings import import_codings
from tests.harness.codings import data, sent

CODINGS: list[Coding] = [
    exact(),
    half(),
    bfloat16(),
    int8(),
    int8(block=64, rounding="stochastic"),
    int4(),
    int4(block=6),
    sign(),
    sign(block=8),
    topk(0.01),
    topk(0.3, threshold="sampled"),
    randomk(0.1),
    compose(topk(0.05), int8()),
    compose(randomk(0.2), half()),
    compose(compose(topk(0.5), exact()), int4(block=32)),
]
LENGTHS = [0, 1, 2, 7, 63, 64, 65, 1023, 1024, 1025, 2000, 140_000]


def test_every_coding_is_tested() -> None:
    assert {type(coding).__name__ for coding in CODINGS} == set(import_codings())


@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize("coding", CODINGS, ids=repr)
def test_every_coding_for_every_length(coding: Coding, numel: int) -> None:
    x = data(numel)
    kept = x.clone()
    out, whole = sent(coding, x)
    assert torch.equal(x, kept), "encoding changes nothing"
    assert bool(out.isfinite().all())
    assert float((out - x).norm()) <= float(x.norm()) * 1.0001 + 1e-6, (
        "what arrives is nearer than nothing"
    )
    assert whole.numel() == count_message_bytes(coding, numel)
    message = split_message(coding, numel, whole)
    assert [(part.dtype, part.numel()) for part in message] == [
        (part.dtype, part.numel) for part in coding.layout(numel)
    ]
    total = data(numel, 1)
    wanted = total + out
    coding.add(message, total)
    assert torch.equal(total, wanted), "multiply, then add"
    coding.add(message, total, minus=True)
    assert torch.equal(total, wanted - out)


@pytest.mark.parametrize("coding", CODINGS, ids=repr)
def test_the_same_seed_gives_the_same_bytes(coding: Coding) -> None:
    x = data(5000)
    assert torch.equal(sent(coding, x, 3)[1], sent(coding, x, 3)[1])
    drawn = not torch.equal(sent(coding, x, 3)[1], sent(coding, x, 4)[1])
    assert drawn == ("stochastic" in repr(coding) or "randomk" in repr(coding))


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize(
    "coding", [coding for coding in CODINGS if "randomk" not in repr(coding)], ids=repr
)
def test_what_is_not_finite_is_never_lost(coding: Coding, bad: float) -> None:
    for at in (0, 999, 139_999):
        x = data(140_000)
        x[at] = bad
        assert not bool(sent(coding, x)[0].isfinite().all())


def test_spans_cover_a_tensor_once() -> None:
    x = torch.empty(300_000)
    for unit in (1, 6, 1024):
        found = list(cut_spans(x, unit))
        assert found[0][0] == 0 and found[-1][1] == x.numel() and len(found) > 1
        assert all(a[1] == b[0] and a[1] % unit == 0 for a, b in itertools.pairwise(found))
    assert list(cut_spans(x[:0])) == []


def test_parts_are_aligned() -> None:
    coding = compose(topk(0.01), int8())  # scales, levels, indices
    whole, message = make_message(coding, 30_050)
    assert [part.dtype for part in message] == [torch.float32, torch.int8, torch.int32]
    assert [(part.data_ptr() - whole.data_ptr()) % part.element_size() for part in message] == [
        0,
        0,
        0,
    ]
    assert message[2].data_ptr() + message[2].nbytes <= whole.data_ptr() + whole.numel()


def test_compose_wants_something_to_make_smaller() -> None:
    with pytest.raises(
        UsageError, match=r"int8\(\) leaves no values that half\(\) could make smaller; put it last"
    ):
        compose(int8(), half())
    with pytest.raises(UsageError, match="compose joins codings"):
        compose(topk(0.1), "int8")  # type: ignore[arg-type]


def test_composed_values_are_those_of_the_inner_coding() -> None:
    x = data(10_000)
    picked, values = sent(topk(0.01), x)[0], sent(compose(topk(0.01), int8()), x)[0]
    where = picked.nonzero().view(-1)
    assert torch.equal(values.nonzero().view(-1), where)
    assert 0 < float((values - picked).abs().max()) <= float(picked.abs().max()) / 127 / 2 * 1.0001


def test_bytes_for_a_million() -> None:
    million = 1 << 20
    expected = {
        exact(): 4.0,
        half(): 2.0,
        bfloat16(): 2.0,
        int8(): 1 + 4 / 1024,
        int4(): 0.5 + 4 / 256,
        sign(): 1 / 8 + 4 / 64,
        topk(1 / 64): 8 / 64,
        randomk(1 / 64): 4 / 64,
        compose(topk(1 / 64), int8()): (4 + 1 + 4 / 1024) / 64,
    }
    for coding, each in expected.items():
        assert count_message_bytes(coding, million) == pytest.approx(each * million, abs=16), coding


def test_repr_is_the_notation() -> None:
    assert (
        repr(compose(topk(0.01, threshold="sampled"), int8(block=64)))
        == "compose(topk(0.01, threshold='sampled'), int8(block=64))"
    )
    assert WirePart(torch.int32, 3).nbytes == 12
