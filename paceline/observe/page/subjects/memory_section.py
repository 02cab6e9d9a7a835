"""The section on memory: bytes that each worker held, by kind, and the predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.formatting import format_count
from paceline.observe.page.drawing import scales
from paceline.observe.page.drawing.bars import Bar, draw_bars
from paceline.observe.page.drawing.figures import (
    Field,
    draw_figure,
    draw_sum,
    find_field,
    read_number,
)
from paceline.observe.page.drawing.html_tables import fold_content, make_table
from paceline.observe.page.markup import Markup, element, join_markup
from paceline.observe.page.subjects.time_section import MAX_BARS
from paceline.record.folder import MEMORY_KINDS

WORDS: Mapping[str, str] = {kind: kind for kind in MEMORY_KINDS}


def draw_memory(data: Mapping[str, Any]) -> Markup | None:
    """Draw the memory of the workers of one run; None if it isn't known."""
    held: Sequence[Mapping[str, Any]] = find_field(data, "memory") or ()
    if not held:
        return None
    rows = [
        Bar(
            _name_rank(data, rank),
            {kind: read_number(data, "memory", rank, "measured", kind) for kind in MEMORY_KINDS},
            draw_sum(data, ("memory", rank, "measured"), scales.format_nbytes),
        )
        for rank in range(len(held))
    ]
    cells = ((_name_rank(data, rank), *_table_cells(data, rank)) for rank in range(len(held)))
    head = (
        "worker",
        *(name for kind in MEMORY_KINDS for name in (kind, "predicted")),
        "process at most",
    )
    hint = (
        "This is held from step to step; what a forward keeps for its backward comes on top, and "
        "so does the process itself."
    )
    more = (
        f" These are the first {MAX_BARS} of {format_count(len(held), 'worker')}."
        if len(held) > MAX_BARS
        else ""
    )
    full_table = fold_content(
        "As a table, with what was predicted",
        make_table(head, cells, "Bytes that each worker held"),
    )
    return join_markup(
        draw_bars("Memory", rows[:MAX_BARS], WORDS),
        element("p", {"class": "hint"}, hint + more),
        full_table,
    )


def _table_cells(data: Mapping[str, Any], rank: int) -> Iterator[Markup]:
    """Yield the cells of the table for a rank."""
    for kind in MEMORY_KINDS:
        for which in ("measured", "predicted"):
            path: Field = ("memory", rank, which, kind)
            yield draw_figure(data, path, scales.format_nbytes)
    yield draw_figure(data, ("memory", rank, "peak"), scales.format_nbytes)


def _name_rank(data: Mapping[str, Any], rank: int) -> str:
    """Return the name of a rank."""
    ranks = data["ranks"]
    return ranks[rank] if rank < len(ranks) else f"rank {rank}"
