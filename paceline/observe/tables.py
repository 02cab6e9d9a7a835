"""How reports write numbers and tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def seconds(value: float) -> str:
    """Format seconds, as reports write them."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def aligned(rows: Iterable[Sequence[str]], *, left: int = 1) -> Iterator[str]:
    """Yield lines of a table, two spaces between columns.

    The first `left` columns are flush left, all others right.
    """
    table = list(rows)
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        cells = [
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(("", *cells)).rstrip()
