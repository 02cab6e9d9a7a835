"""What a tracker is: it is told of steps, histograms, images and events, on a thread of its own,
and of the summary at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from paceline.record.logged.media import MediaItem
from paceline.record.logged.values import PREFIX, RESERVED
from paceline.unequal.stragglers.lateness import RankLateness

Setting = str | int | float | bool
_SETTINGS: Final = ("sync", "workers", "hosts")  # fields of a summary that say what was run
_RESULTS: Final = (  # and those that say what came of it
    *(
        "steps",
        "samples",
        "seconds",
        "samples_per_second",
        "final_loss",
        "step_seconds",
        "bytes_sent",
        "checkpoints",
        "logged",
        "results",
    ),
)


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers see it.

    `identity` is that of the run in all starts of its job and on whichever worker is the first.
    `again`: an earlier start, or a worker that was lost, may have begun it in a tracker already.
    `settings` are what is known of the summary's when the run begins.
    """

    name: str
    folder: Path
    identity: str
    began: float  # seconds since 1970
    settings: Mapping[str, Setting] = field(default_factory=dict)
    again: bool = False


@dataclass(frozen=True)
class TrackedStep:
    """A line of metrics.jsonl, and how late workers were.

    `samples` and `seconds` (of each part, a mean over workers) are None for what was logged of a
    step once it was over.
    """

    step: int
    time: float  # seconds since the run began
    values: Mapping[str, float]
    samples: int | None = None
    seconds: Mapping[str, float] | None = None
    late: Sequence[RankLateness] = ()

    @staticmethod
    def of(line: Mapping[str, Any], late: Sequence[RankLateness]) -> TrackedStep:
        """Read a line as it is written."""
        values = {name: value for name, value in line.items() if name not in RESERVED}
        return TrackedStep(
            line["step"], line["time"], values, line.get("samples"), line.get("seconds"), late
        )

    def scalars(self) -> dict[str, float]:
        """Return all numbers by name: what was logged, and with `paceline/` before it where the
        time of the step went.
        """
        found = dict(self.values)
        if self.seconds is not None and self.samples is not None:
            whole = sum(self.seconds.values())
            found |= {f"{PREFIX}seconds/{part}": spent for part, spent in self.seconds.items()}
            if whole > 0:
                found[f"{PREFIX}samples_per_second"] = self.samples / whole
        if self.late:
            latest = max(self.late, key=lambda each: each.seconds)
            found |= {
                f"{PREFIX}late/seconds": latest.seconds,
                f"{PREFIX}late/worker": float(latest.rank),
            }
        return found


@dataclass(frozen=True)
class TrackedEvent:
    """Something that has happened, `time` seconds after the run began."""

    time: float
    what: str


@dataclass(frozen=True)
class TrackedEnd:
    """The summary of a run that went well: its settings, its numbers by name, and where it lies."""

    settings: Mapping[str, Setting]
    results: Mapping[str, float]
    summary: Path

    @staticmethod
    def of(fields: Mapping[str, Any], summary: Path, known: Mapping[str, Setting]) -> TrackedEnd:
        """Read the fields of a summary. `known`: settings that aren't in it."""
        loader = fields.get("loader") or {}
        asked = dict(_settings("", fields.get("settings") or {}))
        settings: dict[str, Setting] = {
            **known,
            **asked,
            **{name: fields[name] for name in _SETTINGS},
        }
        if fields.get("mesh"):
            settings["mesh"] = ", ".join(f"{axis}={size}" for axis, size in fields["mesh"].items())
        if loader:
            settings |= {
                "loader_workers": loader["num_workers"],
                "shares": ", ".join(map(str, loader["shares"])),
            }
        return TrackedEnd(
            settings,
            {
                name: found
                for field in _RESULTS
                for name, found in _numbers(field, fields.get(field))
            },
            summary,
        )


class Tracker(Protocol):
    """Where a run is reported to. What it raises is said once, and nothing more is given to it."""

    name: str

    def begin(self, run: TrackedRun) -> str:
        """Begin, or go on with the same run, and say in a few words where it is to be seen.

        Raises anything.
        """
        ...

    def steps(self, steps: Sequence[TrackedStep]) -> None:
        """Take in steps, in order."""
        ...

    def media(self, items: Sequence[MediaItem]) -> None:
        """Take in histograms and images."""
        ...

    def event(self, event: TrackedEvent) -> None:
        """Take in what has happened."""
        ...

    def rewind(self, step: int) -> None:
        """Forget what was told of steps after this one, which are taken again, as far as this
        can be done.
        """
        ...

    def conclude(self, end: TrackedEnd) -> None:
        """Take in the summary."""
        ...

    def close(self, *, failed: bool) -> None:
        """Free everything.

        `failed`: the run has ended by an error, or another worker goes on with it.
        """
        ...


def _settings(name: str, value: Any) -> Iterator[tuple[str, Setting]]:
    """Yield the settings in what was asked for, each with a name of its own: `optimizers/1/lr`
    is one of the second optimizer.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _settings(f"{name}/{key}" if name else key, item)
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for place, item in enumerate(value):
            yield from _settings(f"{name}/{place}", item)
    elif isinstance(value, list):
        yield name, ", ".join(map(str, value))
    else:
        yield name, value


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers in a field of a summary, each with a name of its own."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(f"{name}/{key}", item)
    elif isinstance(value, int | float):
        yield name, float(value)
