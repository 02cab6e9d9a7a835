"""State goes into a snapshot and comes back bit for bit, whatever it is made of."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError
from paceline.state.snapshot import (
    Snapshot,
    convert_for_safetensors,
    make_snapshot,
    restore_dtypes,
    snapshot_from_bytes,
)

DTYPES = [
    *(
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.complex32,
    ),
    *(
        torch.bool,
        torch.int8,
        torch.uint8,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.float8_e4m3fn,
    ),
]


def there_and_back(value: Any) -> Any:
    """Through JSON and safetensors, as a checkpoint does."""
    snapshot = snapshot_from_bytes(make_snapshot(value).to_bytes())
    assert snapshot.compute_sha256() == make_snapshot(value).compute_sha256()
    return Snapshot(
        snapshot.version, json.loads(json.dumps(snapshot.tree)), snapshot.tensors
    ).unpack_state()


def same(one: Tensor, other: Tensor) -> bool:
    views = (
        one.contiguous().reshape(-1).view(torch.uint8),
        other.contiguous().reshape(-1).view(torch.uint8),
    )
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*views)


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = math.prod(shape) * dtype.itemsize
    data = torch.randint(
        0,
        2 if dtype is torch.bool else 256,
        (count,),
        generator=torch.Generator().manual_seed(1),
        dtype=torch.uint8,
    )
    return data.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)], ids=str)
def test_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = filled(shape, dtype)
    assert same(there_and_back({"x": tensor})["x"], tensor)


def test_strides_and_odd_views() -> None:
    base = torch.arange(24.0)
    views = {
        "transposed": base.view(4, 6).t(),
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.ones(1, 3).expand(4, 3),
        "slice": base[3:7],
        "every other": base[::2],
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
    }
    back = there_and_back(views)
    for name, view in views.items():
        assert torch.equal(back[name], view), name
    assert back["transposed"].stride() == views["transposed"].stride()
    assert back["channels"].is_contiguous(memory_format=torch.channels_last)
    assert back["slice"].untyped_storage().nbytes() == 16  # not the whole of its base


def test_one_tensor_under_two_names_stays_one() -> None:
    weight = nn.Parameter(torch.randn(3, 3))
    snapshot = make_snapshot({"embedding": weight, "head": weight.data, "transposed": weight.t()})
    assert len(snapshot.tensors) == 2
    back = there_and_back({"embedding": weight, "head": weight.data, "transposed": weight.t()})
    assert back["embedding"] is back["head"]
    assert torch.equal(back["transposed"], weight.t())


def test_plain_python_comes_back_exactly() -> None:
    metadata: OrderedDict[str, Any] = OrderedDict(a=1)
    metadata._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    value = {
        "ints": {0: "zero", 1: None, -5: True},
        "mixed": {1: "int", "1": "text"},
        "floats": [0.1, -0.0, math.inf, -math.inf, 1e308, 5e-324],
        "big": 2**200,
        "tuple": (1, (2.5, "x"), []),
        "size": torch.Size([2, 3]),
        "sets": [{1, 2}, frozenset({"a"})],
        "$": "a key that means something to us",
        "like ours": {"$": "tensor", "path": "nowhere"},
        "counter": Counter({3: 2, 7: 1}),
        "ordered": OrderedDict([("b", 1), ("a", 2)]),
        "tuples as keys": {(1, "a"): 1},
        "bytes": b"\x00\xff",
        "complex": complex(1.5, -0.0),
        "torch": [torch.bfloat16, torch.device("cpu")],
        "text": "ü\n\ud800",
        "empty": [{}, [], ()],
    }
    back = there_and_back(value)
    assert repr(back) == repr(value)
    assert back == value
    assert math.isnan(there_and_back([math.nan])[0])
    assert type(there_and_back(True)) is bool
    assert there_and_back({"m": metadata})["m"]._metadata == {"": {"version": 2}}


def test_keys_that_look_alike() -> None:
    tensors = {
        1: torch.zeros(2),
        "1": torch.ones(2),
        "a/b": torch.ones(1),
        "a": {"b": torch.zeros(1)},
        "__metadata__": torch.ones(3),
    }
    back = there_and_back(tensors)
    assert all(torch.equal(back[key], tensors[key]) for key in (1, "1", "a/b", "__metadata__"))
    assert torch.equal(back["a"]["b"], torch.zeros(1))


def test_numpy() -> None:
    arrays = [
        np.arange(6, dtype=np.uint32).reshape(2, 3)[:, ::-1],
        np.float32(0.1),
        np.bool_(True),
        np.array(3, np.int16),
        np.empty((0, 2)),
    ]
    back = there_and_back(arrays)
    for one, other in zip(back, arrays, strict=True):
        assert type(one) is type(other)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "thing",
    [
        object(),
        lambda: None,
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
        np.array(["text"]),
        np.array([object()]),
        type("Wrapped", (dict,), {})(),
        nn.UninitializedParameter(),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_what_cannot_be_kept_is_named(thing: Any) -> None:
    with pytest.raises(CheckpointError, match=r"optimizer/state/0/x' is a .*dicts, lists"):
        make_snapshot({"optimizer": {"state": {0: {"x": thing}}}})


def test_a_loop_is_found() -> None:
    loop: list[Any] = []
    loop.append([loop])
    with pytest.raises(CheckpointError, match="contains itself"):
        make_snapshot(loop)
    twice: list[int] = [1]
    assert make_snapshot([twice, twice]).unpack_state() == [
        [1],
        [1],
    ]  # the same list twice is no loop


def test_a_snapshot_does_not_change_with_what_it_was_taken_of() -> None:
    x, array = torch.ones(3), np.ones(3)
    snapshot, before = make_snapshot([x, array]), make_snapshot([x, array]).compute_sha256()
    x.zero_()
    array[:] = 0
    assert snapshot.compute_sha256() == before
    snapshot.unpack_state()[0].zero_()
    assert snapshot.compute_sha256() == before


def test_hash_sees_every_bit_and_nothing_else() -> None:
    base: dict[Any, Any] = {0: torch.zeros(2), 1: torch.ones(2, 3), "lr": 0.1}
    reference = make_snapshot(base).compute_sha256()
    assert make_snapshot(dict(reversed(base.items()))).compute_sha256() == reference
    assert make_snapshot({**base, 1: torch.ones(3, 2).t()}).compute_sha256() == reference
    changed = torch.zeros(2)
    changed[1] = -0.0
    for other in (
        {0: changed},
        {0: torch.zeros(2, dtype=torch.int32)},
        {1: torch.ones(3, 2)},
        {"lr": 0.1000000001},
        {"lr": None},
    ):
        assert make_snapshot({**base, **other}).compute_sha256() != reference


def test_lowered_tensors_are_their_own() -> None:
    base = torch.randn(10)
    plain, notes = convert_for_safetensors(
        {
            "a": base[:5],
            "b": base[5:],
            "c": torch.randn(2, dtype=torch.complex64),
            "u": torch.ones(2, dtype=torch.uint16),
        }
    )
    assert plain["a"].untyped_storage().nbytes() == 20
    assert plain["c"].shape == (2, 2)  # readable by whoever opens the file
    assert notes == {"c": ["complex64", [2]], "u": ["uint16", [2]]}
    assert restore_dtypes(plain, notes)["u"].dtype is torch.uint16


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("length", [0, 1, 2])
def test_slices_of_hardly_anything(stride: int, length: int) -> None:
    x = torch.arange(8.0)[: length * stride : stride]
    snapshot = make_snapshot({"x": x}, copy=False)
    assert (
        torch.equal(snapshot_from_bytes(snapshot.to_bytes()).unpack_state()["x"], x)
        and snapshot.compute_sha256() == make_snapshot({"x": x.clone()}).compute_sha256()
    )


def test_what_cannot_be_read_is_known_before() -> None:
    whole = make_snapshot({"a": [torch.ones(2), {1: float("nan")}], "b": np.ones(2)})
    whole.check_readable()
    with pytest.raises(CheckpointError, match="state has 'moon'"):
        Snapshot(0, {"a": [{"$": "tuple", "items": [{"$": "moon"}]}]}, {}).check_readable()
    with pytest.raises(
        CheckpointError, match="the tensor 'a/0', which is missing; it has 1 others"
    ):
        Snapshot(0, whole.tree, {"b": whole.tensors["b"]}).check_readable()


@pytest.mark.parametrize("data", [b"", b"short", b"\xff" * 40, b"\x02" + b"\0" * 7 + b"{}"])
def test_bytes_that_are_no_snapshot(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="are not a snapshot"):
        snapshot_from_bytes(data)
