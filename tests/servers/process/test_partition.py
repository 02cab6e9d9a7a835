"""Every row of every parameter lies on one server, and all servers have about the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.bucket_layout import BucketShape
from paceline.servers.process.partition import (
    MIN_CUT_BYTES,
    PIECES_PER_SERVER,
    cut_parameters,
    deal_pieces,
)


def shapes(*sizes: tuple[int, ...]) -> list[BucketShape]:
    return [
        BucketShape.of_parameter(torch.empty(size, device="meta"))._replace(
            device=torch.device("cpu")
        )
        for size in sizes
    ]


SIZES = st.lists(st.lists(st.integers(0, 700), max_size=3).map(tuple), min_size=1, max_size=12)


@given(SIZES, st.integers(1, 4), st.booleans())
def test_every_row_once(sizes, servers, whole):
    found = shapes(*sizes)
    cut = cut_parameters(found, servers, [whole] * len(found))
    for number, shape in enumerate(found):
        mine = [piece for piece in cut if piece.slot == number]
        assert [row for piece in mine for row in range(piece.start, piece.stop)] == list(
            range(shape.size[0] if shape.size else 1)
        )
        assert sum(piece.nbytes for piece in mine) == shape.numel * 4
        assert not whole or len(mine) == 1
        for piece in mine:
            assert piece.whole == (len(mine) == 1) and piece.shape.size[1:] == shape.size[1:]
    dealt = deal_pieces(cut, servers)
    assert sorted(number for numbers in dealt for number in numbers) == list(range(len(cut)))
    assert all(numbers == sorted(numbers) for numbers in dealt)


@pytest.mark.parametrize("servers", [2, 3, 5])
def test_servers_have_the_same_by_bytes(servers):
    """Also where one parameter is most of the model."""
    found = shapes((100_000, 32), *[(256, 256)] * 6, *[(256,)] * 6)
    cut = cut_parameters(found, servers, [False] * len(found))
    loads = [sum(cut[number].nbytes for number in numbers) for numbers in deal_pieces(cut, servers)]
    assert max(loads) <= min(loads) * (1 + 1 / PIECES_PER_SERVER)


def test_small_and_whole_parameters_are_not_cut():
    found = shapes((MIN_CUT_BYTES // 4,), (1000, 1000))
    assert [piece.whole for piece in cut_parameters(found, 2, [False, True])] == [True, True]
    assert len(cut_parameters(found, 2, [False, False])) > 10


def test_strides_are_kept():
    """A piece of a channels-last convolution is channels-last."""
    weight = torch.empty(512, 64, 3, 3).to(memory_format=torch.channels_last)
    cut = cut_parameters([BucketShape.of_parameter(weight)], 2, [False])
    assert len(cut) > 2 and all(piece.shape.stride == weight.stride() for piece in cut)
