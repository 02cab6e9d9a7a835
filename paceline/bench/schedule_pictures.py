"""Draws all-reduce schedules by name, such as ring:5 or hierarchical:2+3."""

from __future__ import annotations

from paceline.comm.schedule import SCHEDULES, build_schedule, draw_schedule
from paceline.errors import UsageError
from paceline.formatting import format_choices

MAX_WORKERS = 64  # a larger picture is hard to read


def draw_picture(text: str) -> str:
    """Draw the schedule that a text names.

    `NAME:N` has N workers on one host. `NAME:N+M+...` has N workers on the first host, M on the
    second, and so on. `NAME:N+M@A,B` gives the hosts' links speeds A and B, in any unit.
    """
    name, _, rest = text.partition(":")
    sizes, _, speeds = rest.partition("@")
    if name not in SCHEDULES:
        raise UsageError(f"{name} is not a schedule; {format_choices(name, SCHEDULES)}")
    return draw_schedule(
        build_schedule(name, parse_hosts(sizes, text), parse_rates(speeds, text) if speeds else ())
    )


def parse_rates(speeds: str, text: str) -> list[float]:
    """Parse the speed of each host's link: `10,1` is [10.0, 1.0]. Errors show `text`."""
    try:
        return [float(part) for part in speeds.split(",")]
    except ValueError as error:
        raise UsageError(
            f"{text}: behind the @ go the speeds of the hosts' links, as in uneven:1+1+1@10,10,1"
        ) from error


def parse_hosts(numbers: str, text: str) -> list[int]:
    """Parse the number of workers on each host: `2+3` is [0, 0, 1, 1, 1], the host of each worker.

    Errors show `text`.
    """
    parts = numbers.split("+")
    if (
        not all(
            part.isascii() and part.isdecimal() and 0 < int(part) <= MAX_WORKERS for part in parts
        )
        or sum(map(int, parts)) > MAX_WORKERS
    ):
        raise UsageError(
            f"{text}: after the colon goes the number of workers, 1 to {MAX_WORKERS}, as in "
            "ring:5, or the number on each host, as in ring:2+3"
        )
    return [host for host, part in enumerate(parts) for _ in range(int(part))]
