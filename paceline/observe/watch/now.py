"""What the folder of a run says of this moment: whether it is under way, how far, who takes
part, who is late, what has happened last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from paceline.observe.facts import read_fields
from paceline.record.folder import RunFolder
from paceline.record.live import GONE, alive
from paceline.trace import PARTS

# seconds without a word after which that is said, as a step takes less in most runs
SILENT: Final = 60.0

State = Literal["waiting", "running", "silent", "gone", "failed", "ended"]


@dataclass(frozen=True)
class LateRank:
    """The worker that was latest in the last steps."""

    rank: int
    host: str
    seconds: float  # in a mean step
    step: float  # seconds of such a step, of the worker that took longest
    cause: str


@dataclass(frozen=True)
class RunNow:
    """A run at one moment. What isn't known is None or empty."""

    name: str = ""
    state: State = "waiting"
    why: str = ""  # it has failed
    sync: str = ""
    workers: int = 0
    # the name of each host, and the ranks there
    cluster: tuple[tuple[str, tuple[int, ...]], ...] = ()
    step: int = 0
    total_steps: int | None = None
    loss: float | str | None = None  # "nan" and its like are words
    seconds: float | None = None  # since it began
    samples_per_second: float | None = None
    # seconds of a mean step: of the last steps, or of all where it has ended
    parts: Mapping[str, float] = field(default_factory=dict)
    late: LateRank | None = None
    link: str = ""  # whose link is slow now
    shares: tuple[int, ...] = ()  # of a usual batch
    checkpoints: int = 0
    # seconds since it began, and what happened; the last ones
    events: tuple[tuple[float, str], ...] = ()

    @property
    def left(self) -> float | None:
        """Seconds until the last step, if steps go on taking as long; None where that can't be
        told.
        """
        each = sum(self.parts.values())
        if self.state != "running" or self.total_steps is None or each <= 0:
            return None
        return max(self.total_steps - self.step, 0) * each


class NowReader:
    """Reads the moment of one run again and again.

    `clock`: seconds, by which it is told for how long nothing has changed.
    """

    def __init__(self, folder: RunFolder, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._mark: tuple[int, ...] = ()  # of the file that was read last
        self._changed = clock()
        self._now = RunNow(folder.name)
        self._writer: Mapping[str, Any] = {}

    def read(self) -> RunNow:
        """Return the moment.

        A file that can't be read, or is of another version, leaves what was known.
        """
        # where both are there, it goes on
        found = [path for path in (self._folder.live, self._folder.summary) if path.is_file()]
        mark = _mark(found[0]) if found else ()
        if found and mark != self._mark:
            self._mark, self._changed = mark, self._clock()
            fields = _read(found[0])
            now = _parsed(self._folder.name, fields, ended=found[0] == self._folder.summary)
            if now is not None:
                self._now, self._writer = now, (fields.get("live") or {}).get("writer") or {}
        if self._now.state != "running":
            return self._now
        if self.quiet >= GONE and alive(self._writer) is False:
            return replace(self._now, state="gone")
        return replace(self._now, state="silent") if self.quiet >= SILENT else self._now

    @property
    def quiet(self) -> float:
        """Seconds for which nothing has changed."""
        return self._clock() - self._changed


def _mark(path: Path) -> tuple[int, ...]:
    """Return what differs as soon as a file is replaced."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return read_fields(path)
    except (OSError, ValueError, TypeError, LookupError):
        return {}


def _parsed(name: str, fields: Mapping[str, Any], *, ended: bool) -> RunNow | None:
    """Read `live.json`, or the summary of a run that has ended; None where it is of another
    version.
    """
    try:
        return _of(name, fields, ended=ended)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _of(name: str, fields: Mapping[str, Any], *, ended: bool) -> RunNow:
    live = {} if ended else fields["live"]
    recent = live.get("recent") or {}
    parts = {part: float(recent.get(part, fields["step_seconds"][part])) for part in PARTS}
    late, whole = live.get("late"), sum(parts.values()) * float(recent.get("steps", 0))
    return RunNow(
        name=name,
        state="ended" if ended else "failed" if live["state"] == "failed" else "running",
        why=str(live.get("why", "")),
        sync=str(fields["sync"]),
        workers=int(fields["workers"]),
        cluster=tuple(
            (str(host["host"]), tuple(map(int, host["ranks"]))) for host in live.get("cluster", ())
        ),
        step=int(live.get("step", fields["steps"])),
        total_steps=None if live.get("total_steps") is None else int(live["total_steps"]),
        loss=_loss(fields.get("final_loss")),
        seconds=float(fields["seconds"]),
        samples_per_second=float(recent["samples"]) / whole
        if whole > 0
        else _number(fields.get("samples_per_second")),
        parts=parts,
        late=None
        if late is None
        else LateRank(
            int(late["rank"]), *(late[key] for key in ("host", "seconds", "step", "cause"))
        ),
        link=str(live.get("link", "")),
        shares=tuple(map(int, (fields.get("loader") or {}).get("shares", ()))),
        checkpoints=int((fields.get("checkpoints") or {}).get("count", 0)),
        events=tuple(
            sorted(
                (float(event["time"]), str(event["what"]))
                for key in ("events", "saves")
                for event in fields.get(key, ())
            )
        ),
    )


def _loss(value: Any) -> float | str | None:
    return value if value is None or isinstance(value, str) else float(value)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
