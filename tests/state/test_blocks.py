"""Rectangles of tensors: what overlaps, what is missing, and what an index on the disk may say."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import CheckpointError
from paceline.state.blocks import (
    Box,
    StoredBlock,
    StoredTensor,
    box_shape,
    describe_coverage_error,
    index_from_json,
    index_to_json,
    intersect_boxes,
    merge_indexes,
    slice_within,
    whole_box,
)


def stored(shape: tuple[int, ...], *boxes: Box, file: str = "a.safetensors") -> StoredTensor:
    blocks = tuple(StoredBlock(box, file, f"w@{place}") for place, box in enumerate(boxes))
    return StoredTensor(torch.float32, shape, blocks)


def grid(cuts: list[list[int]]) -> list[Box]:
    """All rectangles between these cuts of each dim."""
    ranges = [list(itertools.pairwise(cut)) for cut in cuts]
    return list(itertools.product(*ranges))


edges = st.lists(st.integers(0, 6), min_size=2, max_size=5).map(sorted)


@given(st.lists(edges, min_size=0, max_size=3))
def test_a_grid_covers_its_tensor_and_less_does_not(cuts: list[list[int]]) -> None:
    cuts = [[0, *cut] for cut in cuts]
    shape = [cut[-1] for cut in cuts]
    boxes = grid(cuts)
    assert describe_coverage_error(shape, boxes) == ""
    full = [box for box in boxes if all(box_shape(box))]
    if full:
        assert "elements" in describe_coverage_error(shape, full[1:])
        assert "overlap" in describe_coverage_error(shape, [*full, full[0]])


@given(st.tuples(edges, edges), st.tuples(edges, edges))
def test_an_overlap_is_what_both_have(one: Any, other: Any) -> None:
    a, b = (tuple((cut[0], cut[-1]) for cut in cuts) for cuts in (one, other))

    def cells(box: Box) -> set[tuple[int, ...]]:
        return set(itertools.product(*(range(begin, end) for begin, end in box)))

    common = intersect_boxes(a, b)
    assert cells(common or ((0, 0),)) == cells(a) & cells(b)
    if common:
        full = torch.arange(49).view(7, 7)
        assert torch.equal(
            full[slice_within(a, whole_box((7, 7)))][slice_within(common, a)],
            full[slice_within(common, whole_box((7, 7)))],
        )


def test_a_block_outside_is_named() -> None:
    assert "outside of [2, 2]" in describe_coverage_error((2, 2), [((0, 2), (0, 3))])


def test_a_scalar_is_one_block() -> None:
    assert describe_coverage_error((), [()]) == ""
    assert "0 of 1 elements" in describe_coverage_error((), [])
    assert describe_coverage_error((0, 3), []) == ""


def test_workers_parts_make_the_index() -> None:
    left, right = (
        stored((2, 4), ((0, 2), (0, 2))),
        stored((2, 4), ((0, 2), (2, 4)), file="b.safetensors"),
    )
    merged = merge_indexes([{"w": left}, {"w": right, "v": stored((), ())}])
    assert [block.file for block in merged["w"].blocks] == ["a.safetensors", "b.safetensors"]
    assert index_from_json(index_to_json(merged)) == merged
    with pytest.raises(
        CheckpointError, match=r"w can't be saved in blocks: its blocks have 4 of 8 elements"
    ):
        merge_indexes([{"w": left}])
    with pytest.raises(CheckpointError, match=r"w can't be saved .* overlap"):
        merge_indexes([{"w": left}, {"w": left}, {"w": right}])
    with pytest.raises(CheckpointError, match=r"different shapes"):
        merge_indexes([{"w": left}, {"w": stored((4, 2))}])


def test_what_is_needed_of_a_tensor() -> None:
    tensor = stored((4, 4), ((0, 2), (0, 4)), ((2, 4), (0, 2)), ((2, 4), (2, 4)))
    assert [(block.key, box) for block, box in tensor.iterate_overlaps(((1, 3), (3, 4)))] == [
        ("w@0", ((1, 2), (3, 4))),
        ("w@2", ((2, 3), (3, 4))),
    ]


GOOD: dict[str, Any] = {
    "dtype": "float32",
    "shape": [2],
    "blocks": [{"file": "a", "key": "k", "box": [[0, 2]]}],
}


@pytest.mark.parametrize(
    "entry",
    [
        None,
        {},
        GOOD | {"dtype": "float33"},
        GOOD | {"shape": [-1]},
        GOOD | {"shape": [True]},
        GOOD | {"shape": "2"},
        GOOD | {"shape": [2, 2]},
        GOOD | {"blocks": [{"file": "a", "key": 3, "box": [[0, 2]]}]},
        GOOD | {"blocks": [{"file": None, "key": "k", "box": [[0, 2]]}]},
        GOOD | {"blocks": [{"file": "a", "key": "k", "box": [[0, 2, 3]]}]},
        GOOD | {"blocks": [{"file": "a", "key": "k", "box": [[0, 1e9]]}]},
        GOOD | {"blocks": [{"file": "a", "key": "k", "box": [[0, 1]]}]},
        GOOD | {"blocks": [{"file": "a", "key": "k", "box": [[0, 3]]}]},
        GOOD | {"blocks": 3},
    ],
)
def test_no_index_is_believed(entry: Any) -> None:
    assert index_from_json({"w": GOOD})["w"].shape == (2,)
    with pytest.raises(CheckpointError, match=r"\bw\b"):
        index_from_json({"w": entry})


def test_an_index_is_an_object() -> None:
    with pytest.raises(CheckpointError, match=r"an object"):
        index_from_json([])
