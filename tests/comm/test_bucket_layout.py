from __future__ import annotations

import random

import torch
from torch import nn

from paceline.comm.bucket_layout import (
    ALIGN,
    Bucket,
    BucketShape,
    build_buckets,
    cut_runs,
    find_small_stretches,
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


def test_small_members_lie_in_stretches() -> None:
    shapes = [shape(n) for n in (3, 40, 5, 6, 100, 2)]  # rooms of 16, 48, 16, 16, 112 and 16
    (bucket,) = made(shapes, [list(range(6))])
    assert find_small_stretches(bucket, 40) == [slice(0, 16), slice(64, 96), slice(208, 224)]
    assert find_small_stretches(bucket, 41) == [slice(0, 96), slice(208, 224)]
    assert (
        find_small_stretches(bucket, 1000) == [slice(0, 224)]
        and find_small_stretches(bucket, 1) == []
    )
