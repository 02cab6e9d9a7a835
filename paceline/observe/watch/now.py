"""Reads the current state of a run from its folder: progress, workers, lateness and last events."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from paceline.observe.facts import read_fields
from paceline.record.folder import RunFolder
from paceline.record.live import GONE_SECONDS, is_writer_alive
from paceline.trace import STEP_PARTS

# Seconds without a change after which the page says so. A step takes less in most runs.
SILENT_SECONDS: Final = 60.0

State = Literal["waiting", "running", "silent", "gone", "failed", "ended"]


@dataclass(frozen=True)
class LateRank:
    """The worker that was latest in the last steps."""

    rank: int
    host: str
    seconds: float  # by which it was late in a mean step
    # Seconds of a mean step of the slowest worker.
    step: float
    cause: str


@dataclass(frozen=True)
class RunNow:
    """The state of a run at one moment. Unknown values are None or empty."""

    name: str = ""
    state: State = "waiting"
    why: str = ""  # reason of a failure
    sync: str = ""
    workers: int = 0
    # The name of each host, and the ranks there.
    cluster: tuple[tuple[str, tuple[int, ...]], ...] = ()
    step: int = 0
    total_steps: int | None = None
    loss: float | str | None = None  # NaN and infinities are their names
    seconds: float | None = None  # since it began
    samples_per_second: float | None = None
    # Seconds of a mean step by part: of the last steps, or of all steps if the run has ended.
    parts: Mapping[str, float] = field(default_factory=dict)
    late: LateRank | None = None
    link: str = ""  # describes a link that is slow now
    shares: tuple[int, ...] = ()  # of a usual batch
    checkpoints: int = 0
    # The last events: seconds since the run began, and a text.
    events: tuple[tuple[float, str], ...] = ()

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last step, if steps take as long as before; None if unknown."""
        step_seconds = sum(self.parts.values())
        if self.state != "running" or self.total_steps is None or step_seconds <= 0:
            return None
        return max(self.total_steps - self.step, 0) * step_seconds


class NowReader:
    """Reads the current state of one run again and again.

    `clock` returns seconds. It measures for how long nothing has changed, independently of wall
    clocks, which may differ between machines.
    """

    def __init__(self, folder: RunFolder, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._file_mark: tuple[int, ...] = ()  # identifies the file that was read last
        self._changed_at = clock()
        self._last_state = RunNow(folder.name)
        self._writer: Mapping[str, Any] = {}

    def read_state(self) -> RunNow:
        """Return the current state.

        If a file can't be read, or is of another version, the last known state remains.
        """
        # If both files exist, the run was resumed, so the live file counts.
        paths = [path for path in (self._folder.live, self._folder.summary) if path.is_file()]
        mark = _mark_file(paths[0]) if paths else ()
        if paths and mark != self._file_mark:
            self._file_mark, self._changed_at = mark, self._clock()
            fields = _read_file(paths[0])
            now = _parse_fields(self._folder.name, fields, ended=paths[0] == self._folder.summary)
            if now is not None:
                self._last_state, self._writer = now, (fields.get("live") or {}).get("writer") or {}
        if self._last_state.state != "running":
            return self._last_state
        # A dead writer alone proves nothing: another worker may have taken over, and will write
        # soon.
        if self.quiet_seconds >= GONE_SECONDS and is_writer_alive(self._writer) is False:
            return replace(self._last_state, state="gone")
        return (
            replace(self._last_state, state="silent")
            if self.quiet_seconds >= SILENT_SECONDS
            else self._last_state
        )

    @property
    def quiet_seconds(self) -> float:
        """Seconds since the last change."""
        return self._clock() - self._changed_at


def _mark_file(path: Path) -> tuple[int, ...]:
    """Return a value that changes when a file is replaced."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_mtime_ns, status.st_size


def _read_file(path: Path) -> Mapping[str, Any]:
    """Read the fields of a file; none if it can't be read."""
    try:
        return read_fields(path)
    except (OSError, ValueError, TypeError, LookupError):
        return {}


def _parse_fields(name: str, fields: Mapping[str, Any], *, ended: bool) -> RunNow | None:
    """Convert live.json or a summary; None if it is of another version."""
    try:
        return _state_from_fields(name, fields, ended=ended)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _state_from_fields(name: str, fields: Mapping[str, Any], *, ended: bool) -> RunNow:
    """Convert the fields of live.json or a summary."""
    live = {} if ended else fields["live"]
    recent = live.get("recent") or {}
    parts = {part: float(recent.get(part, fields["step_seconds"][part])) for part in STEP_PARTS}
    late_fields, recent_seconds = (
        live.get("late"),
        sum(parts.values()) * float(recent.get("steps", 0)),
    )
    late = None
    if late_fields is not None:
        details = (late_fields[key] for key in ("host", "seconds", "step", "cause"))
        late = LateRank(int(late_fields["rank"]), *details)
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
        loss=_read_loss(fields.get("final_loss")),
        seconds=float(fields["seconds"]),
        samples_per_second=float(recent["samples"]) / recent_seconds
        if recent_seconds > 0
        else _optional_float(fields.get("samples_per_second")),
        parts=parts,
        late=late,
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


def _read_loss(value: Any) -> float | str | None:
    """Convert a loss. The names of NaN and infinities stay."""
    return value if value is None or isinstance(value, str) else float(value)


def _optional_float(value: Any) -> float | None:
    """Return a float, or None for None."""
    return None if value is None else float(value)
