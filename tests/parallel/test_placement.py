"""Whatever the cuts, the parts of all workers make up the logical tensor, each element once."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from paceline.errors import UsageError
from paceline.parallel import placement as module
from paceline.parallel.placement import Placement, Placements, Region, chunk_range, local_part

SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple)


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(int(torch.tensor(shape).prod())).view(shape)


def fused(placement: Placement, dim: int, index: int, count: int, parts: int) -> Placement:
    """Cut each of some fused parts of a dimension by itself."""
    size = placement.local[dim] // parts
    return placement.cut_dim(
        dim,
        [
            (part * size + a, part * size + b)
            for part in range(parts)
            for a, b in [chunk_range(size, index, count)]
        ],
        "tensor",
    )


def put_together(shape: tuple[int, ...], parts: list[Placement]) -> tuple[Tensor, Tensor]:
    """Write what each placement takes of a numbered tensor back to where it is from, and count
    how often each element comes.
    """
    wanted = numbered(shape)
    whole, counts = torch.full(shape, -1), torch.zeros(shape, dtype=torch.int64)
    for placement in parts:
        mine = placement.copy_part(wanted)
        assert mine.shape == placement.local and mine.numel() == placement.numel
        assert (
            sum(region.view_local(mine).numel() for region in placement.regions) == placement.numel
        )
        for region in placement.regions:
            region.view_logical(whole).copy_(region.view_local(mine))
            region.view_logical(counts).add_(1)
    return whole, counts


@given(SHAPES, st.data())
def test_all_parts_of_all_cuts_make_up_the_whole(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    count, pieces = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    parts = data.draw(st.sampled_from([n for n in (1, 2, 3) if shape[dim] % n == 0]))
    flat = data.draw(st.booleans())
    found = []
    for index in range(count):
        cut = fused(Placement.whole("w", shape), dim, index, count, parts)
        for piece in range(pieces):
            start, stop = chunk_range(cut.numel, piece, pieces)
            rows = chunk_range(cut.local[0], piece, pieces)
            found.append(
                cut.cut_flat(start, stop, "shard") if flat else cut.cut_dim(0, [rows], "shard")
            )
    whole, counts = put_together(shape, found)
    assert torch.equal(whole, numbered(shape)) and bool((counts == 1).all())


@given(SHAPES, st.data())
def test_a_flat_piece_is_what_a_view_of_the_tensor_shows(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    size = numbered(shape).numel()
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    piece = Placement.whole("w", shape).cut_flat(start, stop, "shard")
    assert torch.equal(piece.copy_part(numbered(shape)), numbered(shape).flatten()[start:stop])
    assert len(piece.regions) <= 2 * len(shape) - 1


def test_a_piece_of_a_large_tensor_is_found_without_looking_at_its_elements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = []
    monkeypatch.setattr(
        module,
        "_find_runs",
        lambda *given, find=module._find_runs: looks.append(given) or find(*given),
    )
    piece = Placement.whole("w", (1 << 20, 1 << 10, 1 << 10)).cut_flat(
        (1 << 38) + 5, (1 << 38) + (1 << 30), "shard"
    )
    assert (
        sum(prod(region.shape) for region in piece.regions) == (1 << 30) - 5
        and len(piece.regions) <= 5
    )
    assert len(looks) <= 10


def test_the_drawing() -> None:
    rank1 = fused(Placement.whole("qkv", (6, 4)), 0, 1, 2, 3)
    assert rank1.local == (3, 4)
    assert rank1.regions == tuple(
        Region(((row, row + 1), (0, 4)), ((at, at + 1), (0, 4))) for at, row in enumerate((1, 3, 5))
    )
    piece = rank1.cut_flat(2, 7, "shard")
    assert piece.regions == (
        Region(((1, 2), (2, 4)), ((0, 2),)),
        Region(((3, 4), (0, 3)), ((2, 5),)),
    )
    assert piece.axes == ("tensor", "shard")


def test_scalars_have_one_piece() -> None:
    scalar = Placement.whole("scale", ())
    assert (
        scalar.is_whole
        and scalar.cut_flat(0, 1, "shard").numel == 1
        and scalar.cut_flat(1, 1, "shard").regions == ()
    )
    assert scalar.cut_flat(0, 1, "shard").copy_part(torch.tensor(3.0)).tolist() == [3.0]


def test_pieces_are_not_cut_again() -> None:
    piece = Placement.whole("w", (4, 4)).cut_flat(2, 9, "shard")
    assert piece.is_flat and not piece.is_whole
    with pytest.raises(UsageError, match=r"w is cut into flat pieces already.*tensor\(\) first"):
        piece.cut_dim(0, [(0, 1)], "tensor")
    with pytest.raises(UsageError, match="once"):
        piece.cut_flat(0, 1, "shard")


def test_placements_follow_a_parameter_that_is_replaced() -> None:
    placements, old, new = Placements(), Parameter(torch.zeros(4, 2)), Parameter(torch.zeros(2, 2))
    assert placements.placement_of(old, "w") == Placement.whole("w", (4, 2))
    placements.add_placement(old, Placement.whole("w", (4, 2)))
    half = placements.placement_of(old).cut_dim(0, [(2, 4)], "tensor")
    placements.add_placement(old, whole_of_old := placements.placement_of(old, "w"))
    placements.replace_tensor(old, new, half)
    assert placements.placement_of(old) is whole_of_old and [*placements] == [half], (
        "the old one is where it was, and counts no more"
    )
    assert (
        placements.placement_of(new) == half and list(placements) == [half] and len(placements) == 1
    )
    assert [parameter is new for parameter, _ in placements.parameters()] == [True]


def test_the_local_part_is_in_the_same_memory() -> None:
    plain = Parameter(torch.zeros(3))
    local_part(plain).add_(1)
    assert plain.tolist() == [1.0, 1.0, 1.0] and type(local_part(plain)) is Tensor
