"""All that was logged of one step on one worker: sums of numbers, states of metrics, and on the
first worker histograms and images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch import nn

from paceline.errors import UsageError
from paceline.record.logged.histogram import Histogram
from paceline.record.logged.host_copy import HostCopy
from paceline.record.logged.image import Image
from paceline.record.logged.media import HeldMedia, MediaItem
from paceline.record.logged.metric import HeldState, is_metric
from paceline.record.logged.sums import SumsOnTheirWay, WeightedSum, number, send

# fields of a line in metrics.jsonl
RESERVED: Final = ("step", "time", "samples", "seconds", "bytes_sent", "ranks")
PREFIX: Final = "paceline/"  # of what trackers are told of a step beside what was logged


@dataclass
class LoggedValues:
    """What was logged, by name."""

    sums: dict[str, WeightedSum] = field(default_factory=dict)
    states: dict[str, HeldState] = field(default_factory=dict)
    media: dict[str, HeldMedia] = field(default_factory=dict)
    _on_their_way: list[SumsOnTheirWay] = field(default_factory=list)

    def add(self, name: str, value: Any, weight: float, *, shows: bool) -> nn.Module | None:
        """Add a value to what is known, and return it if it is a metric. Never waits for a device.

        Numbers count by `weight`; those of weight 0 are left out. Histograms and images are held if
        this worker `shows` them. The last state, histogram or image of a name is what counts.
        Raises `UsageError` for a name or a value that can't be logged.
        """
        check_name(name)
        if isinstance(value, Histogram | Image):
            if shows:
                self.media[name] = HeldMedia.hold(value)
            return None
        if is_metric(value):
            self.states[name] = HeldState(value)
            return value  # type: ignore[no-any-return]
        found = number(name, value)
        if weight != 0:
            self.sums.setdefault(name, WeightedSum()).add(found, weight)
        return None

    @property
    def empty(self) -> bool:
        """Whether nothing counts of what was logged."""
        return not (self.sums or self.states or self.media)

    def take_in(self, later: LoggedValues) -> None:
        """Add what was logged later."""
        for name, sums in later.sums.items():
            self.sums.setdefault(name, WeightedSum()).take_in(sums)
        self.states |= later.states
        self.media |= later.media

    def send(self) -> None:
        """Begin to copy to the host what is still on devices."""
        self._on_their_way = send(self.sums.values())

    def done(self) -> bool:
        """Whether nothing is on its way any more."""
        copies: list[HostCopy | SumsOnTheirWay | HeldState] = [
            *self._on_their_way,
            *self.states.values(),
        ]
        return all(
            copy.done() for copy in [*copies, *(media.copy for media in self.media.values())]
        )

    def means(self) -> dict[str, list[float]]:
        """Return each sum and its weight, and wait for them if need be."""
        for copy in self._on_their_way:
            copy.read()
        self._on_their_way = []
        return {name: [sums.total, sums.weight] for name, sums in self.sums.items()}

    def packed_states(self) -> dict[str, bytes]:
        """Return the states of metrics, to be handed over."""
        return {name: state.packed() for name, state in self.states.items()}

    def shown(self, step: int, time: float) -> Iterator[MediaItem]:
        """Yield the histograms and images."""
        for name, media in self.media.items():
            yield MediaItem(step, time, name, media.content())

    def state(self) -> tuple[dict[str, list[float]], dict[str, list[Any]]]:
        """Return sums, and histograms and images, for `load`; metrics aren't part of it, as
        their own state is the script's.
        """
        return {name: sums.packed() for name, sums in self.sums.items()}, {
            name: media.state() for name, media in self.media.items()
        }

    @staticmethod
    def load(sums: Mapping[str, list[float]], media: Mapping[str, list[Any]]) -> LoggedValues:
        """Go on from what `state` has returned."""
        held = {name: HeldMedia.load(state) for name, state in media.items()}
        return LoggedValues(
            {name: WeightedSum(total, weight) for name, (total, weight) in sums.items()}, media=held
        )


def check_name(name: str) -> None:
    """Raise `UsageError` for a name under which nothing can be logged."""
    if name in RESERVED:
        raise UsageError(
            f"run.log({name}=...): a line of metrics.jsonl has a field {name!r} of its own; "
            "give it another name"
        )
    if not name.isprintable():
        raise UsageError(
            f"run.log(**{{{name!r}: ...}}): a name goes to terminals and files of others; "
            "leave out what can't be printed"
        )
    if not name or name.startswith(PREFIX):
        raise UsageError(
            f"run.log(**{{{name!r}: ...}}): give a name that isn't empty and doesn't begin with "
            f"{PREFIX!r}"
        )
