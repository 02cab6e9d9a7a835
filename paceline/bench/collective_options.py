"""Parses the arguments of `paceline bench collectives` without torch, so that the command line
refuses senseless ones at once.
"""

from __future__ import annotations

import re

from paceline.comm.schedule import SCHEDULES
from paceline.errors import UsageError
from paceline.formatting import format_choices

UNITS = {"B": 1, "KB": 1_000, "MB": 1_000_000}


def parse_sizes(text: str) -> list[int]:
    """Parse a list of sizes with commas, such as `4KB,33MB`, as bytes."""
    return [parse_size(part) for part in text.split(",")]


def parse_size(text: str) -> int:
    """Parse a size, `4KB`, `33MB` or `100B`, as bytes, a multiple of 4 (float32)."""
    match = re.fullmatch(r"(\d{1,6})([KM]?B)", text.strip())
    nbytes = int(match[1]) * UNITS[match[2]] // 4 * 4 if match else 0
    if not nbytes:
        raise UsageError(
            f"--sizes {text}: a size is a whole number with B, KB or MB behind it, and 4 bytes at "
            "least, such as 256KB"
        )
    return nbytes


def parse_algorithms(text: str) -> list[str]:
    """Parse a list of names with commas: `native`, or schedules."""
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name != "native" and name not in SCHEDULES:
            raise UsageError(f"--via {name}: {format_choices(name, ['native', *SCHEDULES])}")
    return names
