from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from paceline.comm.bucket_layout import (
    ALIGN,
    Bucket,
    BucketShape,
    build_buckets,
    cut_runs,
    put_all_scaled,
    put_scaled,
)

FLOAT, HALF = torch.float32, torch.float16
CPU = torch.device("cpu")


def shape(numel: int, dtype: torch.dtype = FLOAT) -> BucketShape:
    return BucketShape((numel,), (1,), dtype, CPU)


def made(shapes: list[BucketShape], runs: list[list[int]]) -> list[Bucket]:
    return build_buckets(
        shapes,
        runs,
        lambda numel, dtype, device: torch.full((numel,), 7, dtype=dtype, device=device),
    )


def test_a_parameter_keeps_its_strides_if_they_are_dense() -> None:
    image = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert BucketShape.of_parameter(image) == (
        (2, 3, 4, 5),
        image.stride(),
        FLOAT,
        CPU,
        None,
    ) and BucketShape.of_parameter(image).size_in_memory == (2, 4, 5, 3)
    assert BucketShape.of_parameter(torch.empty(3, 4).t()).stride == (1, 4)
    assert BucketShape.of_parameter(torch.empty(3, 1).expand(3, 4)).stride == (4, 1)
    assert BucketShape.of_parameter(torch.empty(6, 8)[::2, ::2]).stride == (4, 1)
    scalar = BucketShape.of_parameter(nn.Parameter(torch.tensor(1.0)))
    assert (scalar.numel, scalar.padded_numel) == (1, ALIGN // 4) and BucketShape.of_parameter(
        torch.empty(0, 3)
    ).padded_numel == 0


def test_kinds_share_no_bucket_and_lie_without_gaps() -> None:
    shapes = [shape(5)._replace(kind=kind) for kind in ("a", None, "a", "b", None)]
    runs = cut_runs(shapes, range(5), 10_000)
    assert runs == [[0, 2], [1, 4], [3]]
    buckets = build_buckets(
        shapes, runs, lambda numel, dtype, device: torch.empty(numel, dtype=dtype, device=device)
    )
    assert [bucket.flat.numel() for bucket in buckets] == [10, 2 * ALIGN // 4, 5]


def test_runs_follow_the_order_and_the_limits() -> None:
    shapes = [shape(16 * n) for n in (1, 2, 3, 100, 1, 1)]  # 64 bytes each unit
    assert cut_runs(shapes, range(6), 64 * 1000) == [[0, 1, 2, 3, 4, 5]]
    # what is above the limit has its own
    assert cut_runs(shapes, range(6), 64 * 3) == [[0, 1], [2], [3], [4, 5]]
    assert cut_runs(shapes, [5, 4, 3, 2, 1, 0], 64 * 3) == [[5, 4], [3], [2], [1, 0]]
    assert cut_runs(shapes, range(6), 64 * 1000, first=64 * 3) == [[0, 1], [2, 3, 4, 5]]
    assert cut_runs(shapes, [], 100) == []


def test_kinds_fill_buckets_of_their_own_side_by_side() -> None:
    shapes = [shape(16), shape(32, HALF), shape(16), shape(32, HALF), shape(16)]
    assert cut_runs(shapes, range(5), 128) == [[0, 2], [1, 3], [4]]


def test_buckets_hold_every_parameter_once_aligned_and_zero() -> None:
    dice = random.Random(1)
    shapes = [
        shape(dice.choice([0, 1, 3, 16, 17, 1000]), dice.choice([FLOAT, HALF, torch.float64]))
        for _ in range(60)
    ]
    shapes[7] = BucketShape.of_parameter(
        torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    )
    runs = cut_runs(shapes, range(60), 5000, first=500)
    buckets = made(shapes, runs)
    assert sorted(number for bucket in buckets for number in bucket.members) == list(range(60))
    for bucket in buckets:
        assert bool((bucket.flat == 0).all()) and bucket.flat.numel() >= 1
        for number, view in zip(bucket.members, bucket.views, strict=True):
            assert (tuple(view.shape), view.stride(), view.dtype) == shapes[number][:3]
            assert (view.data_ptr() - bucket.flat.data_ptr()) % ALIGN == 0 or view.numel() == 0
            view += number + 1
        for number, view in zip(bucket.members, bucket.views, strict=True):
            assert bool((view == number + 1).all())  # no two overlap


def test_views_lie_right_in_a_flat_tensor_that_does_not_begin_its_memory() -> None:
    memory = torch.ones(100)
    [bucket] = build_buckets(
        [shape(5), shape(3)], [[1, 0]], lambda numel, *_: memory[10 : 10 + numel]
    )
    for number, view in zip(bucket.members, bucket.views, strict=True):
        view.fill_(number + 5)
    assert (
        memory[10:13].tolist() == [6, 6, 6]
        and memory[26:31].tolist() == [5] * 5
        and memory[:10].sum() == 10
    )


@pytest.mark.parametrize("scale", [1.0, 0.25, 1 / 3, 0.0, 1e-50])
@pytest.mark.parametrize("dtype", [FLOAT, torch.float64])
def test_many_tensors_are_scaled_into_their_places(dtype: torch.dtype, scale: float) -> None:
    xs = [torch.randn(n, dtype=dtype) for n in (1, 7, 64, 1000)] + [torch.randn(3, 5, dtype=dtype)]
    if scale == 0.0:
        xs[1][3] = float("nan")
    (bucket,) = made([shape(x.numel(), dtype) for x in xs], [list(range(len(xs)))])
    views = [view.view(x.shape) for view, x in zip(bucket.views, xs, strict=True)]
    expected = bucket.flat.clone()
    for view, x in zip(bucket.views, xs, strict=True):
        start = view.storage_offset() - bucket.flat.storage_offset()
        put_scaled(expected[start : start + x.numel()], x.reshape(-1), scale)
    assert put_all_scaled(views, xs, scale)
    assert torch.equal(bucket.flat, expected)  # to the bit, and gaps are left alone


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(4, dtype=torch.float64),
        torch.ones(5),
        torch.ones(8)[::2],
        torch.ones(4, dtype=torch.complex64).conj().imag,  # with a sign that is pending
        nn.Parameter(torch.ones(4)),
        torch.ones(4, device="meta"),
    ],
    ids=["dtype", "length", "strides", "sign", "subclass", "device"],
)
def test_other_tensors_are_left_to_torch(x: torch.Tensor) -> None:
    views = [torch.full((4,), 7.0), torch.full((4,), 7.0)]
    assert not put_all_scaled(views, [torch.ones(4), x], 0.5)
    assert all(view.eq(7).all() for view in views)
    assert not put_all_scaled([torch.zeros(4).half()], [torch.ones(4).half()], 0.5)
    assert not put_all_scaled([torch.zeros(4, 4).t()], [torch.ones(4, 4)], 0.5)
