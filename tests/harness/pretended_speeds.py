"""Workers of given speeds, without anybody waiting for a clock: each says what its samples have
taken.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.unequal.shares.quota import ProcessorQuota

Speeds = Callable[[int, int], float]  # rank, step -> seconds for a sample


class PretendedSpeed(ProcessorQuota):
    """A quota of one worker that takes `fixed` seconds for a step, and what `speeds` says for
    each sample that it was told of.
    """

    def __init__(self, rank: int, speeds: Speeds, fixed: float) -> None:
        super().__init__(1, quota=lambda: None)
        self._rank, self._speeds, self._fixed, self._samples, self._step = rank, speeds, fixed, 0, 0

    def did(self, samples: int) -> None:
        """Note that this worker goes through so many samples in this step."""
        self._samples += samples

    def skip_use(self) -> None:
        self._samples = 0

    def measure_lap(self) -> float:
        """Return the seconds of the step."""
        samples, self._samples, self._step = self._samples, 0, self._step + 1
        return self._fixed + samples * self._speeds(self._rank, self._step)


def pretended(size: int, speeds: Speeds, fixed: float = 5.0) -> list[PretendedSpeed]:
    """Workers of these speeds.

    Seconds are many, so that what steps really take is nothing beside them.
    """
    return [PretendedSpeed(rank, speeds, fixed) for rank in range(size)]
