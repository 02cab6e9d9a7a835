from __future__ import annotations

import itertools

import pytest

from paceline.comm.hierarchy import chunks


@pytest.mark.parametrize("numel", [0, 1, chunks.NARROW, 5 * chunks.NARROW, 25_000_000])
def test_chunks_are_narrow_at_both_ends(numel: int) -> None:
    found = chunks.cut(numel)
    assert sum(stop - start for start, stop in found) == numel
    assert all(one[1] == other[0] for one, other in itertools.pairwise(found))
    if numel == 25_000_000:
        widths = [stop - start for start, stop in found]
        assert widths[0] == widths[-1] == chunks.NARROW and max(widths) == chunks.WIDE
