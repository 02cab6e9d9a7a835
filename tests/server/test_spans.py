"""Spans of samples join, and what lies between them is found."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.server.spans import SampleSpans


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    cuts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8), st.integers(1, 9)), max_size=12),
)
def test_spans_and_holes_are_all_there_is(sizes: list[int], cuts: list[tuple[int, int, int]]) -> None:
    rows = [[5 + batch, start, min(stop, sizes[batch])] for batch, start, stop in cuts if batch < len(sizes)]
    rows = [row for row in rows if row[1] < row[2]]
    spans = SampleSpans(rows)
    inside = {(batch, sample) for batch, start, stop in rows for sample in range(start, stop)}
    assert [(batch, sample) for batch, start, stop in spans.rows() for sample in range(start, stop)] == sorted(inside)
    outside = [(batch, sample) for batch, start, stop in spans.holes(5, sizes) for sample in range(start, stop)]
    assert outside == [(5 + n, sample) for n, size in enumerate(sizes) for sample in range(size) if (5 + n, sample) not in inside]
