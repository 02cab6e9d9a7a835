from __future__ import annotations

import itertools

import pytest

from paceline.comm.hierarchy import chunks


@pytest.mark.parametrize(
    ("numel", "count"), [(0, 0), (1, 1), (chunks.WIDTH, 1), (chunks.WIDTH + 1, 2), (25_000_000, 12)]
)
def test_chunks_are_few_and_of_a_size(numel: int, count: int) -> None:
    found = chunks.cut_chunks(numel)
    widths = [stop - start for start, stop in found]
    assert len(found) == count and sum(widths) == numel
    assert all(one[1] == other[0] for one, other in itertools.pairwise(found))
    assert (
        max(widths, default=0) <= chunks.WIDTH
        and max(widths, default=0) - min(widths, default=0) <= 1
    )
