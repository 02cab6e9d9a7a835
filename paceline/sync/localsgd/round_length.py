"""Length of the rounds of local SGD: fixed, or adapted to the distance between replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from paceline.sync.localsgd.fragment import Fragment, adaptive


class RoundLength:
    """Steps of a round, and this worker's drift in the last one.

    Args:
        every: Steps of each round, or how they adapt.
        delay: Steps for which changes are on their way.
    """

    def __init__(self, every: int | adaptive, delay: int) -> None:
        self._every, self._delay = every, delay
        self.steps = every.first if isinstance(every, adaptive) else every
        # Squared distance of this worker's change from the mean change, and squared norm of the
        # mean change. Zero if the length is fixed.
        self.drift = (0.0, 0.0)

    @property
    def adapts(self) -> bool:
        """Whether rounds adapt to the drift."""
        return isinstance(self._every, adaptive)

    def is_due(self, fragment: Fragment, index: int, count: int, local_steps: int) -> bool:
        """Whether the round of a fragment ends with this step.

        In the first round, fragments are sent at equal distances. From then on each is sent again
        after `steps` steps, so that fragments take turns.

        Args:
            fragment: The fragment.
            index: Its index.
            count: Number of fragments.
            local_steps: Steps since the end of the warm-up, with this one.
        """
        if local_steps < self.steps:
            return local_steps == self.steps * (index + 1) // count
        return fragment.steps_made >= self.steps

    def set_steps(self, steps: int) -> None:
        """Use the length of another worker's rounds, or of a checkpoint's."""
        self.steps = steps

    def begin_measuring(self) -> None:
        """Begin to measure the drift of a round."""
        self.drift = (0.0, 0.0)

    def measure_drift(self, own_change: Tensor, mean_change: Tensor) -> None:
        """Add the drift of some parameters to that of the round."""
        distance, norm = self.drift
        self.drift = (
            distance + float((own_change - mean_change).square().sum()),
            norm + float(mean_change.square().sum()),
        )

    def adapt_steps(self, drifts: Sequence[Sequence[float]]) -> None:
        """Set the length of the next round by the drift of all workers in the last one."""
        distance, norm = (sum(drift[side] for drift in drifts) / len(drifts) for side in (0, 1))
        if isinstance(self._every, adaptive) and norm > 0:
            # An exchange must end before the next one of its fragment begins.
            self.steps = max(
                self._every.next_steps(self.steps, math.sqrt(distance / norm)), self._delay + 1
            )
