"""Formats numbers and tables of reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def format_seconds(value: float) -> str:
    """Format seconds as in reports."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def align_columns(rows: Iterable[Sequence[str]], *, left: int = 1) -> Iterator[str]:
    """Yield the lines of a table, with two spaces between columns.

    The first `left` columns are aligned left, all others right.
    """
    cells = list(rows)
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    for row in cells:
        padded = [
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(("", *padded)).rstrip()
