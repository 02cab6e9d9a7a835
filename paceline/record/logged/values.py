"""All values that one worker has logged in one step: numbers, metrics, histograms and images."""

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
from paceline.record.logged.metric import HeldMetricState, is_metric
from paceline.record.logged.sums import SumsInTransit, WeightedSum, send_to_host, to_number

# Fields of a line in metrics.jsonl.
RESERVED_FIELDS: Final = ("step", "time", "samples", "seconds", "bytes_sent", "ranks")
# Prefix of the names under which trackers get the time of a step.
TRACKER_PREFIX: Final = "paceline/"


@dataclass
class LoggedValues:
    """Logged values by name. Histograms and images are held on the first worker only."""

    sums: dict[str, WeightedSum] = field(default_factory=dict)
    states: dict[str, HeldMetricState] = field(default_factory=dict)
    media: dict[str, HeldMedia] = field(default_factory=dict)
    _in_transit: list[SumsInTransit] = field(default_factory=list)

    def add_value(self, name: str, value: Any, weight: float, *, shows: bool) -> nn.Module | None:
        """Add a value. Never waits for a device.

        Numbers of weight 0 are left out. The last metric state, histogram or image of a name
        counts.

        Args:
            name: Name of the value.
            value: Number, tensor of one element, metric, histogram or image.
            weight: Weight of a number.
            shows: Whether this worker holds histograms and images.

        Returns:
            The value if it is a metric, else None.

        Raises:
            UsageError: The name or the value can't be logged.
        """
        check_logged_name(name)
        if isinstance(value, Histogram | Image):
            if shows:
                self.media[name] = HeldMedia.hold_media(value)
            return None
        if is_metric(value):
            self.states[name] = HeldMetricState(value)
            return value  # type: ignore[no-any-return]
        converted = to_number(name, value)
        if weight != 0:
            self.sums.setdefault(name, WeightedSum()).add_number(converted, weight)
        return None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was logged that counts."""
        return not (self.sums or self.states or self.media)

    def add_later_values(self, later: LoggedValues) -> None:
        """Add values that were logged later."""
        for name, sums in later.sums.items():
            self.sums.setdefault(name, WeightedSum()).add_sum(sums)
        self.states |= later.states
        self.media |= later.media

    def send_to_host(self) -> None:
        """Start to copy numbers on devices to the host."""
        self._in_transit = send_to_host(self.sums.values())

    def has_arrived(self) -> bool:
        """Whether all copies have arrived on the host."""
        copies: list[HostCopy | SumsInTransit | HeldMetricState] = [
            *self._in_transit,
            *self.states.values(),
        ]
        return all(
            copy.has_arrived() for copy in [*copies, *(media.copy for media in self.media.values())]
        )

    def read_sums(self) -> dict[str, list[float]]:
        """Return each sum and its weight. Waits for devices if necessary."""
        for copy in self._in_transit:
            copy.read_sums()
        self._in_transit = []
        return {name: [sums.total, sums.weight] for name, sums in self.sums.items()}

    def pack_states(self) -> dict[str, bytes]:
        """Return the states of metrics as bytes."""
        return {name: state.pack_state() for name, state in self.states.items()}

    def read_media(self, step: int, time: float) -> Iterator[MediaItem]:
        """Yield the histograms and images."""
        for name, media in self.media.items():
            yield MediaItem(step, time, name, media.read_content())

    def to_state(self) -> tuple[dict[str, list[float]], dict[str, list[Any]]]:
        """Return the sums, and the histograms and images, for `from_state`.

        Metrics are not included, because the script saves their states itself.
        """
        return {name: sums.pack_sum() for name, sums in self.sums.items()}, {
            name: media.to_state() for name, media in self.media.items()
        }

    @staticmethod
    def from_state(sums: Mapping[str, list[float]], media: Mapping[str, list[Any]]) -> LoggedValues:
        """Restore the output of `to_state`."""
        # Metrics keep their own states, so there is nothing to restore for them.
        held = {name: HeldMedia.from_state(state) for name, state in media.items()}
        return LoggedValues(
            {name: WeightedSum(total, weight) for name, (total, weight) in sums.items()}, media=held
        )


def check_logged_name(name: str) -> None:
    """Raise `UsageError` if nothing can be logged under this name."""
    if name in RESERVED_FIELDS:
        raise UsageError(
            f"run.log({name}=...): a line of metrics.jsonl has a field {name!r} of its own; "
            "give it another name"
        )
    if not name.isprintable():
        raise UsageError(
            f"run.log(**{{{name!r}: ...}}): names appear on terminals and in files; leave out "
            "characters that can't be printed"
        )
    if not name or name.startswith(TRACKER_PREFIX):
        raise UsageError(
            f"run.log(**{{{name!r}: ...}}): give a name that isn't empty and doesn't begin with "
            f"{TRACKER_PREFIX!r}"
        )
