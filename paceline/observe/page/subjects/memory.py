"""The section on memory: what each worker held, by kind, beside what was predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.formatting import counted
from paceline.observe.page.drawing import scales
from paceline.observe.page.drawing.bars import Bar, bars
from paceline.observe.page.drawing.figures import Field, figure, find, number, summed
from paceline.observe.page.drawing.html_tables import folded, table
from paceline.observe.page.markup import Markup, element, join
from paceline.observe.page.subjects.time import MOST
from paceline.record.folder import KINDS

WORDS: Mapping[str, str] = {kind: kind for kind in KINDS}


def section(data: Mapping[str, Any]) -> Markup | None:
    """Draw what the workers of one run held; None where that isn't known."""
    held: Sequence[Mapping[str, Any]] = find(data, "memory") or ()
    if not held:
        return None
    rows = [
        Bar(
            _label(data, rank),
            {kind: number(data, "memory", rank, "measured", kind) for kind in KINDS},
            summed(data, ("memory", rank, "measured"), scales.nbytes),
        )
        for rank in range(len(held))
    ]
    cells = ((_label(data, rank), *_cells(data, rank)) for rank in range(len(held)))
    head = ("worker", *(name for kind in KINDS for name in (kind, "predicted")), "process at most")
    hint = (
        "This is held from step to step; what a forward keeps for its backward comes on top, and "
        "so does the process itself."
    )
    more = (
        f" These are the first {MOST} of {counted(len(held), 'worker')}."
        if len(held) > MOST
        else ""
    )
    tabled = folded(
        "As a table, with what was predicted", table(head, cells, "Bytes that each worker held")
    )
    return join(
        bars("Memory", rows[:MOST], WORDS), element("p", {"class": "hint"}, hint + more), tabled
    )


def _cells(data: Mapping[str, Any], rank: int) -> Iterator[Markup]:
    for kind in KINDS:
        for which in ("measured", "predicted"):
            path: Field = ("memory", rank, which, kind)
            yield figure(data, path, scales.nbytes)
    yield figure(data, ("memory", rank, "peak"), scales.nbytes)


def _label(data: Mapping[str, Any], rank: int) -> str:
    ranks = data["ranks"]
    return ranks[rank] if rank < len(ranks) else f"rank {rank}"
