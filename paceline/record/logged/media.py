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
_READERS: Final[dict[str, Callable[[Tensor], Content]]] = {
    "histogram": HistogramCounts.from_vector,
    "image": Pixels.from_tensor,
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
    def hold_media(media: Histogram | Image) -> HeldMedia:
        """Copy what is to be shown out of the tensor, as it is now. Never waits for a device."""
        return HeldMedia(
            "histogram" if isinstance(media, Histogram) else "image",
            HostCopy(media.to_compact_tensor(), shared=True),
        )

    def read_content(self) -> Content:
        """Return the content. Waits for the device if necessary."""
        return _READERS[self.kind](self.copy.read_tensor())

    def to_state(self) -> list[Any]:
        """Return this as plain data for `from_state`. Waits for the device."""
        return [self.kind, self.copy.read_tensor()]

    @staticmethod
    def from_state(state: list[Any]) -> HeldMedia:
        """Restore the output of `to_state`."""
        return HeldMedia(state[0], HostCopy(state[1], shared=True))
