"""Samples per second by number of servers, from the table of a plan.

The table is TOML, as `paceline plan --out plan.toml` writes it:

    workers = [4, 4]          # workers of each host; may be missing

    [samples_per_second]      # by number of workers
    1 = 100.0
    8 = 640.0

Between two counts the rate lies on the line between theirs. Below the smallest count it is in
proportion to servers. Beyond the largest count it goes on along the line through the last two
counts: rising at most in proportion to servers, and never falling. With a single count it is in
proportion everywhere.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from paceline.errors import UsageError

_MAX_PLAN_NBYTES: Final = 1 << 20


@dataclass(frozen=True)
class SampleRates:
    """Samples per second by number of servers.

    Attributes:
        by_servers: Rates of some numbers of servers, in ascending order of servers. Not empty.
        source: Where they come from.
    """

    by_servers: Mapping[float, float]
    source: str

    @property
    def largest(self) -> int:
        """Largest whole number of servers that the rates cover, at least 1."""
        return max(1, math.floor(max(self.by_servers)))

    def find_rate(self, servers: int) -> float:
        """Find the samples per second of a number of servers."""
        points = sorted(self.by_servers.items())
        if servers <= 0:
            return 0.0
        first_servers, first_rate = points[0]
        if servers <= first_servers or len(points) == 1:
            return first_rate * servers / first_servers
        for (below, below_rate), (above, above_rate) in pairwise(points):
            if servers <= above:
                part = (servers - below) / (above - below)
                return below_rate + part * (above_rate - below_rate)
        (below, below_rate), (last, last_rate) = points[-2:]
        slope = (last_rate - below_rate) / (last - below)
        return last_rate + min(max(slope, 0.0), last_rate / last) * (servers - last)

    def describe(self, servers: int) -> str:
        """Say how the rate of a number of servers follows from the table."""
        counts = sorted(self.by_servers)
        if servers in self.by_servers:
            return self.source
        if len(counts) == 1 or servers < counts[0]:
            return f"{self.source}, in proportion from {counts[0]:g}"
        if servers > counts[-1]:
            return f"{self.source}, extrapolated from {counts[-2]:g} and {counts[-1]:g}"
        return f"{self.source}, interpolated"


def read_sample_rates(path: Path, workers_per_server: int | None = None) -> SampleRates:
    """Read the rates of a plan.

    Args:
        path: The plan, a TOML file.
        workers_per_server: Workers that run on each server. Default: as the plan says, else 1.

    Raises:
        UsageError: The file can't be read, or has no usable table.
    """
    try:
        if path.stat().st_size > _MAX_PLAN_NBYTES:
            raise UsageError(f"the plan {path} has more than 1 MB")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the plan {path} can't be read: {error}") from error
    return parse_sample_rates(text, str(path), workers_per_server)


def parse_sample_rates(
    text: str, source: str, workers_per_server: int | None = None
) -> SampleRates:
    """Parse the TOML of a plan. Arguments and errors are those of `read_sample_rates`."""
    try:
        content: dict[str, Any] = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{source} isn't TOML: {error}") from error
    table = content.get("samples_per_second")
    if not isinstance(table, dict) or not table:
        raise UsageError(
            f"{source} has no table [samples_per_second] with lines such as 4 = 310.5: "
            "make it with `paceline plan --out`"
        )
    if workers_per_server is None:
        workers_per_server = _find_workers_per_server(content.get("workers", [1]), source)
    if workers_per_server < 1:
        raise UsageError(f"--workers-per-server {workers_per_server}: at least 1 is needed")
    rates: dict[float, float] = {}
    for count, rate in table.items():
        is_rate = type(rate) in (int, float) and 0 < rate < math.inf
        if not count.isdecimal() or int(count) == 0 or not is_rate:
            raise UsageError(
                f"{source}: samples_per_second.{count} = {rate!r} isn't a rate above 0 "
                "of a number of workers"
            )
        rates[int(count) / workers_per_server] = float(rate)
    return SampleRates(dict(sorted(rates.items())), source)


def _find_workers_per_server(workers: object, source: str) -> int:
    """Return the workers of each host of a plan."""
    if not isinstance(workers, list) or not all(type(count) is int for count in workers):
        raise UsageError(f"{source}: workers = {workers!r} isn't a list of numbers")
    if len({*workers}) != 1:
        raise UsageError(
            f"{source}: hosts with different numbers of workers, {workers}: "
            "give --workers-per-server"
        )
    return int(workers[0])
