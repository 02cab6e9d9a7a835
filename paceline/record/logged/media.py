"""Histograms and images that are logged: those of the first worker, held until their step is
over.
"""

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
    """What was logged under `name` in a step, `time` seconds after the run began."""

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
    def hold(given: Histogram | Image) -> HeldMedia:
        """Take what is to be shown out of the tensor, as it is now. Never waits for a device."""
        return HeldMedia(
            "histogram" if isinstance(given, Histogram) else "image",
            HostCopy(given.compact(), shared=True),
        )

    def content(self) -> Content:
        """Return what has come, and wait for it if need be."""
        return _READ[self.kind](self.copy.read())

    def state(self) -> list[Any]:
        """Return this for `load`; it waits for a device."""
        return [self.kind, self.copy.read()]

    @staticmethod
    def load(state: list[Any]) -> HeldMedia:
        """Hold again what `state` has returned."""
        return HeldMedia(state[0], HostCopy(state[1], shared=True))
