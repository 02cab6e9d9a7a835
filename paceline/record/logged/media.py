"""Histograms and images that are logged on the first worker, held until their step has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from paceline.record.logged.histogram import Histogram, HistogramCounts
from paceline.record.logged.host_copy import HostCopy
from paceline.record.logged.image import Image, Pixels

Content = HistogramCounts | Pixels
_READ: Final[dict[str, Callable[[Tensor], Content]]] = {
    "histogram": HistogramCounts.of,
    "image": Pixels.of,
}


@dataclass(frozen=True)
class MediaItem:
    """A histogram or image that was logged in a step, `time` seconds after the run began."""

    step: int
    time: float
    name: str
    content: Content


@dataclass(frozen=True)
class HeldMedia:
    """A histogram or an image on its way to the host."""

    kind: str
    copy: HostCopy

    @staticmethod
    def hold(media: Histogram | Image) -> HeldMedia:
        """Copy what is to be shown out of the tensor, as it is now. Never waits for a device."""
        return HeldMedia(
            "histogram" if isinstance(media, Histogram) else "image",
            HostCopy(media.compact(), shared=True),
        )

    def content(self) -> Content:
        """Return the content. Waits for the device if necessary."""
        return _READ[self.kind](self.copy.read())

    def state(self) -> list[Any]:
        """Return this as plain data for `from_state`. Waits for the device."""
        return [self.kind, self.copy.read()]

    @staticmethod
    def load(state: list[Any]) -> HeldMedia:
        """Restore the output of `to_state`."""
        return HeldMedia(state[0], HostCopy(state[1], shared=True))
