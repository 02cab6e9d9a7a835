"""How often servers fail: rates as a user writes them, rates of large clusters, and traces.

A trace is a CSV file with the columns `server`, `from_hour`, `to_hour` and `state` (`up` or
`down`). The rows of a server follow each other without holes, and all servers are described from
hour 0 to the same last hour:

    server,from_hour,to_hour,state
    a,0,30.5,up
    a,30.5,31,down
    a,31,48,up
    b,0,48,up
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from paceline.errors import UsageError

DAY: Final = 86_400.0
HOUR: Final = 3_600.0

# Failures of a server per day in large clusters, and who has published them.
PRESETS: Final[dict[str, tuple[float, str]]] = {
    "rsc-1": (6.50e-3, "Meta RSC-1, 6.50 per 1,000 node-days (arXiv 2410.21680)"),
    "rsc-2": (2.34e-3, "Meta RSC-2, 2.34 per 1,000 node-days (arXiv 2410.21680)"),
    "llama-3": (3.79e-3, "Llama 3, 419 in 54 days of 2,048 nodes (arXiv 2407.21783)"),
}
_COLUMNS: Final = ["server", "from_hour", "to_hour", "state"]
_RATE: Final = re.compile(
    r"(?P<count>[^/]+)/(?:(?P<many>[0-9]+)-)?(?:node-|server-)?(?P<unit>day|hour)s?"
)
_MAX_TRACE_NBYTES: Final = 64 << 20


class Outage(NamedTuple):
    """A time in which a server of a trace was down, in seconds since the trace began."""

    server: int
    begin: float
    end: float


@dataclass(frozen=True)
class FailureTrace:
    """A record of which servers were down, and when.

    Attributes:
        servers: Number of servers in the trace.
        seconds: Length of the trace.
        outages: All outages, in the order in which they begin.
    """

    servers: int
    seconds: float
    outages: tuple[Outage, ...]

    @property
    def down_seconds(self) -> float:
        """Mean seconds of an outage; 0 if there is none."""
        total = math.fsum(outage.end - outage.begin for outage in self.outages)
        return total / len(self.outages) if self.outages else 0.0

    @property
    def rate(self) -> float:
        """Failures of a server per second in which it is up."""
        failures = sum(1 for outage in self.outages if outage.begin > 0)
        down = math.fsum(outage.end - outage.begin for outage in self.outages)
        return failures / (self.servers * self.seconds - down)


@dataclass(frozen=True)
class Failures:
    """How servers fail.

    Attributes:
        rate: Failures of one server per second.
        origin: Where the rate comes from.
        together: Servers that fail at the same moment, such as those of a rack.
        trace: The trace that the rate comes from, if there is one.
    """

    rate: float
    origin: str
    together: int = 1
    trace: FailureTrace | None = None

    def mean_time(self, servers: int) -> float:
        """Mean seconds between two moments at which some of `servers` fail."""
        total = self.rate * servers / self.together
        return 1 / total if total > 0 else math.inf


def parse_failures(text: str, together: int = 1) -> Failures:
    """Parse `--failures`.

    Args:
        text: A rate such as `6.5/1000-node-days`, `0.02/day` or `0.05/hour` (of each server), the
            name of a preset (`PRESETS`), or the path of a trace (`.csv`).
        together: Servers that fail at the same moment. Default: 1.

    Raises:
        UsageError: The text is none of these, or the trace can't be read.
    """
    if together < 1:
        raise UsageError(f"--together {together}: at least one server fails at a time")
    if text.lower() in PRESETS:
        per_day, origin = PRESETS[text.lower()]
        return Failures(per_day / DAY, origin, together)
    if text.lower().endswith(".csv"):
        if together != 1:
            raise UsageError(
                "--together contradicts a trace, which says itself what fails together: "
                "leave it out"
            )
        trace = read_trace(Path(text))
        return Failures(trace.rate, f"{text}, {trace.servers} servers", 1, trace)
    match = _RATE.fullmatch(text.strip())
    count = math.nan if match is None else _read_number(match["count"])
    many = 1 if match is None or match["many"] is None else int(match["many"])
    if match is None or not 0 <= count < math.inf or many == 0:
        raise UsageError(
            f"--failures {text!r} isn't a rate: write 6.5/1000-node-days, 0.02/day or 0.05/hour, "
            f"one of {', '.join(PRESETS)}, or the name of a trace (.csv)"
        )
    per_second = count / many / (DAY if match["unit"] == "day" else HOUR)
    return Failures(per_second, "given", together)


def read_trace(path: Path) -> FailureTrace:
    """Read a trace from a file. Raises `UsageError` if it can't be read or has holes."""
    try:
        if path.stat().st_size > _MAX_TRACE_NBYTES:
            raise UsageError(f"the trace {path} has more than 64 MB")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the trace {path} can't be read: {error}") from error
    return parse_trace(text, str(path))


def parse_trace(text: str, source: str) -> FailureTrace:
    """Parse the CSV of a trace; `source` names it in errors.

    Raises:
        UsageError: A row can't be read, or a server has a hole in its rows.
    """
    try:
        cells = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise UsageError(f"{source} isn't a CSV file: {error}") from error
    if not cells or cells[0] != _COLUMNS:
        raise UsageError(f"{source}: the first line has to be {','.join(_COLUMNS)}")
    rows_by_server: dict[str, list[tuple[float, float, str]]] = {}
    for number, row in enumerate(cells[1:], 2):
        if row:
            server, begin, end, state = _read_row(row, f"{source}, line {number}")
            rows_by_server.setdefault(server, []).append((begin, end, state))
    if not rows_by_server:
        raise UsageError(f"{source} has no rows")
    last_hour = max(end for rows in rows_by_server.values() for _, end, _ in rows)
    outages: list[Outage] = []
    for number, (server, rows) in enumerate(rows_by_server.items()):
        _check_holes(sorted(rows), last_hour, f"{source}: server {server}")
        outages += _list_outages(number, sorted(rows))
    seconds = last_hour * HOUR
    down = math.fsum(outage.end - outage.begin for outage in outages)
    if down >= len(rows_by_server) * seconds:
        raise UsageError(f"{source}: no server is ever up")
    return FailureTrace(
        len(rows_by_server), seconds, tuple(sorted(outages, key=lambda outage: outage.begin))
    )


def _read_row(row: list[str], where: str) -> tuple[str, float, float, str]:
    """Read a row of a trace."""
    if len(row) != len(_COLUMNS):
        raise UsageError(f"{where}: {len(row)} columns, where {','.join(_COLUMNS)} are wanted")
    server, begin, end, state = (cell.strip() for cell in row)
    if state not in ("up", "down"):
        raise UsageError(f"{where}: the state is {state!r}, and has to be up or down")
    hours = _read_number(begin), _read_number(end)
    if not 0 <= hours[0] < hours[1] < math.inf:
        raise UsageError(f"{where}: {begin} to {end} aren't hours that follow each other")
    return server, *hours, state


def _check_holes(rows: Iterable[tuple[float, float, str]], last_hour: float, where: str) -> None:
    """Raise `UsageError` if the rows of a server leave a time out, or describe one twice."""
    reached = 0.0
    for begin, end, _ in rows:
        if begin != reached:
            fault = "a hole" if begin > reached else "an overlap"
            raise UsageError(f"{where} has {fault} between hours {reached:g} and {begin:g}")
        reached = end
    if reached != last_hour:
        raise UsageError(f"{where} has a hole between hours {reached:g} and {last_hour:g}")


def _list_outages(server: int, rows: Iterable[tuple[float, float, str]]) -> list[Outage]:
    """List the outages of a server. Rows that follow each other become one outage."""
    outages: list[Outage] = []
    for begin, end, state in rows:
        if state == "down":
            joins = bool(outages) and outages[-1].end == begin * HOUR
            start = outages.pop().begin if joins else begin * HOUR
            outages.append(Outage(server, start, end * HOUR))
    return outages


def _read_number(text: str) -> float:
    """Read a number; NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
