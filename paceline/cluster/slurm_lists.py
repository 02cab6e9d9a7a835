"""The lists in variables of Slurm: names of nodes, and numbers of tasks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from paceline.errors import PlaceError


def expand_nodelist(nodelist: str) -> Iterator[str]:
    """Expand a Slurm list into host names: `a[01-03,7],b` into a01 a02 a03 a7 b."""
    # Entries are divided at commas outside of brackets. An entry may have several brackets.
    for entry in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", nodelist):
        # With a group in the pattern, `split` puts the contents of brackets at odd indices.
        pieces = re.split(r"\[([^\]]*)\]", entry.strip())
        choices = [
            list(_expand_ranges(piece)) if index % 2 else [piece]
            for index, piece in enumerate(pieces)
        ]
        yield from map("".join, itertools.product(*choices))


def _expand_ranges(ranges: str) -> Iterator[str]:
    """Yield the numbers in brackets of a Slurm list, with their leading zeros."""
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        if not low.isdigit() or (high and not high.isdigit()):
            raise PlaceError(
                f"[{ranges}] in a Slurm node list can't be read: "
                "set MASTER_ADDR to the host of rank 0"
            )
        for number in range(int(low), int(high or low) + 1):
            yield str(number).zfill(len(low))


def expand_task_counts(text: str) -> list[int]:
    """Expand the numbers of tasks on each node: `2(x3),1` into 2, 2, 2, 1."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts
