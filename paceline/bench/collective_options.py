"""Parses the arguments of `paceline bench collectives`.

It doesn't import torch, so the command line refuses wrong arguments at once.
"""

from __future__ import annotations

import re

from paceline.comm.schedule import SCHEDULES
from paceline.errors import UsageError
from paceline.formatting import format_choices

UNITS = {"B": 1, "KB": 1_000, "MB": 1_000_000}


def parse_sizes(text: str) -> list[int]:
    """Parse sizes with commas, such as `4KB,33MB`, as bytes."""
    return [parse_size(part) for part in text.split(",")]


def parse_size(text: str) -> int:
    """Parse a size, such as `4KB`, `33MB` or `100B`, as bytes.

    The result is rounded down to a multiple of 4, the size of a float32.
    """
    # At most six digits, so a size is less than a terabyte.
    match = re.fullmatch(r"(\d{1,6})([KM]?B)", text.strip())
    nbytes = int(match[1]) * UNITS[match[2]] // 4 * 4 if match else 0
    if not nbytes:
        raise UsageError(
            f"--sizes {text}: give a whole number and B, KB or MB, at least 4 bytes in all, "
            "such as 256KB"
        )
    return nbytes


def parse_algorithms(text: str) -> list[str]:
    """Parse names with commas. A name is `native`, or that of a schedule."""
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name != "native" and name not in SCHEDULES:
            raise UsageError(f"--via {name}: {format_choices(name, ['native', *SCHEDULES])}")
    return names
