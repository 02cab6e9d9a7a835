"""The interface of trackers, and the data that they get: the run, steps, events and the summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from paceline.record.logged.media import MediaItem
from paceline.record.logged.values import PREFIX, RESERVED
from paceline.unequal.stragglers.lateness import RankLateness

Setting = str | int | float | bool
# Fields of a summary that are settings of the run.
_SETTINGS: Final = ("sync", "workers", "hosts")
# Fields of a summary that are its results.
_RESULTS: Final = (
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

    Attributes:
        name: Name of the run.
        folder: Folder of the run.
        identity: Identifier of the run, the same in all starts of its job and on any first worker.
        began: Wall time of the start, in seconds since 1970.
        settings: Settings of the summary that are known at the start.
        again: Whether an earlier start, or a lost worker, may have begun the run in the tracker.
    """

    name: str
    folder: Path
    identity: str
    began: float
    settings: Mapping[str, Setting] = field(default_factory=dict)
    again: bool = False


@dataclass(frozen=True)
class TrackedStep:
    """A line of metrics.jsonl, and how late workers were.

    `samples` and `seconds` (of each part, a mean over workers) are None for values that were logged
    after their step had ended.
    """

    step: int
    time: float  # seconds since the run began
    values: Mapping[str, float]
    samples: int | None = None
    seconds: Mapping[str, float] | None = None
    late: Sequence[RankLateness] = ()

    @staticmethod
    def of(line: Mapping[str, Any], late: Sequence[RankLateness]) -> TrackedStep:
        """Convert a line of metrics.jsonl."""
        values = {name: value for name, value in line.items() if name not in RESERVED}
        return TrackedStep(
            line["step"], line["time"], values, line.get("samples"), line.get("seconds"), late
        )

    def scalars(self) -> dict[str, float]:
        """Return all numbers by name: logged values, and the time of the step as `paceline/...`."""
        numbers = dict(self.values)
        if self.seconds is not None and self.samples is not None:
            step_seconds = sum(self.seconds.values())
            numbers |= {
                f"{PREFIX}seconds/{part}": part_seconds
                for part, part_seconds in self.seconds.items()
            }
            if step_seconds > 0:
                numbers[f"{PREFIX}samples_per_second"] = self.samples / step_seconds
        # Of several late workers, the latest one is reported.
        if self.late:
            latest = max(self.late, key=lambda each: each.seconds)
            numbers |= {
                f"{PREFIX}late/seconds": latest.seconds,
                f"{PREFIX}late/worker": float(latest.rank),
            }
        return numbers


@dataclass(frozen=True)
class TrackedEvent:
    """Something that happened, `time` seconds after the run began."""

    time: float
    what: str


@dataclass(frozen=True)
class TrackedEnd:
    """The summary of a run that went well: settings, numbers by name, and its path."""

    settings: Mapping[str, Setting]
    results: Mapping[str, float]
    summary: Path

    @staticmethod
    def of(fields: Mapping[str, Any], summary: Path, known: Mapping[str, Setting]) -> TrackedEnd:
        """Convert the fields of a summary. `known` are settings that the summary doesn't have."""
        loader = fields.get("loader") or {}
        given = dict(_settings("", fields.get("settings") or {}))
        # Later entries win: the summary is more reliable than what was known at the start.
        settings: dict[str, Setting] = {
            **known,
            **given,
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
                name: value
                for field in _RESULTS
                for name, value in _numbers(field, fields.get(field))
            },
            summary,
        )


class Tracker(Protocol):
    """A service that a run is reported to.

    If a method raises, that is announced once, and the tracker gets nothing more. All methods
    except `begin_run` are called on the thread of the tracker's delivery.
    """

    name: str

    def begin(self, run: TrackedRun) -> str:
        """Begin the run, or continue it, and return in a few words where it can be seen.

        It may raise anything.
        """
        ...

    def steps(self, steps: Sequence[TrackedStep]) -> None:
        """Log steps, in order."""
        ...

    def media(self, items: Sequence[MediaItem]) -> None:
        """Log histograms and images."""
        ...

    def event(self, event: TrackedEvent) -> None:
        """Log an event."""
        ...

    def rewind(self, step: int) -> None:
        """Forget steps after `step`, which are taken again, as far as possible."""
        ...

    def conclude(self, end: TrackedEnd) -> None:
        """Log the summary."""
        ...

    def close(self, *, failed: bool) -> None:
        """Free everything.

        `failed`: the run has ended with an error, or another worker continues it.
        """
        ...


def _settings(name: str, value: Any) -> Iterator[tuple[str, Setting]]:
    """Yield the settings in a value, each with a name of its own.

    For example, `optimizers/1/lr` is the learning rate of the second optimizer.
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
