"""The interface of trackers, and the data that they get: the run, steps, events and the summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from paceline.record.logged.media import MediaItem
from paceline.record.logged.values import RESERVED_FIELDS, TRACKER_PREFIX
from paceline.unequal.stragglers.lateness import RankLateness

Setting = str | int | float | bool
# Fields of a summary that are settings of the run.
_SETTING_FIELDS: Final = ("sync", "workers", "hosts")
# Fields of a summary that are its results.
_RESULT_FIELDS: Final = (
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
    def from_line(line: Mapping[str, Any], late: Sequence[RankLateness]) -> TrackedStep:
        """Convert a line of metrics.jsonl."""
        values = {name: value for name, value in line.items() if name not in RESERVED_FIELDS}
        return TrackedStep(
            line["step"], line["time"], values, line.get("samples"), line.get("seconds"), late
        )

    def to_scalars(self) -> dict[str, float]:
        """Return all numbers by name: logged values, and the time of the step as `paceline/...`."""
        numbers = dict(self.values)
        if self.seconds is not None and self.samples is not None:
            step_seconds = sum(self.seconds.values())
            numbers |= {
                f"{TRACKER_PREFIX}seconds/{part}": part_seconds
                for part, part_seconds in self.seconds.items()
            }
            if step_seconds > 0:
                numbers[f"{TRACKER_PREFIX}samples_per_second"] = self.samples / step_seconds
        # Of several late workers, the latest one is reported.
        if self.late:
            latest = max(self.late, key=lambda each: each.seconds)
            numbers |= {
                f"{TRACKER_PREFIX}late/seconds": latest.seconds,
                f"{TRACKER_PREFIX}late/worker": float(latest.rank),
            }
        return numbers


@dataclass(frozen=True)
class TrackedEvent:
    """Something that happened, `time` seconds after the run began."""

    time: float
    what: str


@dataclass(frozen=True)
class TrackedSummary:
    """The summary of a run that went well: settings, numbers by name, and its path."""

    settings: Mapping[str, Setting]
    results: Mapping[str, float]
    summary: Path

    @staticmethod
    def from_fields(
        fields: Mapping[str, Any], summary: Path, known: Mapping[str, Setting]
    ) -> TrackedSummary:
        """Convert the fields of a summary. `known` are settings that the summary doesn't have."""
        loader = fields.get("loader") or {}
        given = dict(_flatten_settings("", fields.get("settings") or {}))
        # Later entries win: the summary is more reliable than what was known at the start.
        settings: dict[str, Setting] = {
            **known,
            **given,
            **{name: fields[name] for name in _SETTING_FIELDS},
        }
        if fields.get("mesh"):
            settings["mesh"] = ", ".join(f"{axis}={size}" for axis, size in fields["mesh"].items())
        if loader:
            settings |= {
                "loader_workers": loader["num_workers"],
                "shares": ", ".join(map(str, loader["shares"])),
            }
        return TrackedSummary(
            settings,
            {
                name: value
                for field in _RESULT_FIELDS
                for name, value in _flatten_numbers(field, fields.get(field))
            },
            summary,
        )


class Tracker(Protocol):
    """A service that a run is reported to.

    If a method raises, that is announced once, and the tracker gets nothing more. All methods
    except `begin_run` are called on the thread of the tracker's delivery.
    """

    name: str

    def begin_run(self, run: TrackedRun) -> str:
        """Begin the run, or continue it, and return in a few words where it can be seen.

        It may raise anything.
        """
        ...

    def log_steps(self, steps: Sequence[TrackedStep]) -> None:
        """Log steps, in order."""
        ...

    def log_media(self, items: Sequence[MediaItem]) -> None:
        """Log histograms and images."""
        ...

    def log_event(self, event: TrackedEvent) -> None:
        """Log an event."""
        ...

    def rewind_to_step(self, step: int) -> None:
        """Forget steps after `step`, which are taken again, as far as possible."""
        ...

    def log_summary(self, end: TrackedSummary) -> None:
        """Log the summary."""
        ...

    def close(self, *, failed: bool) -> None:
        """Free everything.

        `failed`: the run has ended with an error, or another worker continues it.
        """
        ...


def _flatten_settings(name: str, value: Any) -> Iterator[tuple[str, Setting]]:
    """Yield the settings in a value, each with a name of its own.

    For example, `optimizers/1/lr` is the learning rate of the second optimizer.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten_settings(f"{name}/{key}" if name else key, item)
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for place, item in enumerate(value):
            yield from _flatten_settings(f"{name}/{place}", item)
    elif isinstance(value, list):
        yield name, ", ".join(map(str, value))
    else:
        yield name, value


def _flatten_numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers in a field of a summary, each with a name of its own."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten_numbers(f"{name}/{key}", item)
    elif isinstance(value, int | float):
        yield name, float(value)
