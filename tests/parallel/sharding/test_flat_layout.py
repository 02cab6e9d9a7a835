"""Every element of every parameter is in one piece, where the layout says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.parallel.sharding.flat_layout import FlatLayout


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 7))
def test_pieces_make_up_the_parameters(numels: list[int], workers: int) -> None:
    layout = FlatLayout(tuple(numels), workers)
    assert sum(numels) <= layout.padded_numel == workers * layout.part_numel < sum(numels) + workers
    flat = [(number, at) for number, numel in enumerate(numels) for at in range(numel)] + [None] * (
        layout.padded_numel - sum(numels)
    )
    for (start, stop), number in zip(layout.parameter_ranges(), range(len(numels)), strict=True):
        assert flat[start:stop] == [(number, at) for at in range(numels[number])]
    for rank in range(workers):
        part = flat[rank * layout.part_numel : (rank + 1) * layout.part_numel]
        for number, ((first, last), (start, stop)) in enumerate(
            zip(layout.piece_ranges(rank), layout.part_ranges(rank), strict=True)
        ):
            assert part[start:stop] == [(number, at) for at in range(first, last)]
        assert sum(last - first for first, last in layout.piece_ranges(rank)) == sum(
            one is not None for one in part
        )


def test_the_drawing() -> None:
    layout = FlatLayout((7, 3), 4)
    assert [layout.piece_ranges(rank) for rank in range(4)] == [
        [(0, 3), (0, 0)],
        [(3, 6), (0, 0)],
        [(6, 7), (0, 2)],
        [(7, 7), (2, 3)],
    ]
    assert [layout.part_ranges(rank)[1] for rank in range(4)] == [(3, 3), (3, 3), (1, 3), (0, 1)]
