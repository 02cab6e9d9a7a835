"""Shares by speed: the division of a batch with which the slowest worker finishes soonest.

    seconds        rank 0: 10 ms + 2 ms per sample      batch of 45:  30 samples -> 70 ms
     |       . 1   rank 1: 10 ms + 4 ms per sample                    15 samples -> 70 ms
     |    .  . 0
     +---------> units

Units are samples, or the costs of a loader's samples.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from paceline.errors import DataError

# Steps of a bisection, after which floats can't tell the ends of the interval apart.
_BISECTIONS: Final = 100


@dataclass(frozen=True)
class SpeedCurve:
    """Seconds of a worker's turn: `fixed`, and `per_unit` for each unit.

    Raises:
        DataError: A value is negative or infinite, or `per_unit` is 0.
    """

    fixed: float
    per_unit: float

    def __post_init__(self) -> None:
        if not (0 < self.per_unit < math.inf and 0 <= self.fixed < math.inf):
            raise DataError(
                f"{self.per_unit} s for a sample and {self.fixed} s besides are no speed: give "
                "numbers of seconds, above 0 for a sample, and leave out a worker that stands still"
            )

    def __call__(self, units: float) -> float:
        """Seconds of a turn with this number of units."""
        return self.fixed + self.per_unit * units

    def units_in(self, seconds: float) -> float:
        """Number of units that take this number of seconds."""
        return max((seconds - self.fixed) / self.per_unit, 0.0)

    def scaled_by(self, factor: float) -> SpeedCurve:
        """Curve of a worker that takes `factor` times as long for everything."""
        return SpeedCurve(self.fixed * factor, self.per_unit * factor)


def balance_shares(batch: int, curves: Sequence[SpeedCurve]) -> tuple[int, ...]:
    """Whole shares of `batch` samples with which the slowest worker finishes soonest.

    Each worker gets a sample if there are enough: without one it computes on a ghost, which takes
    as long.
    """
    smallest = int(batch >= len(curves))
    shares = [max(int(part), smallest) for part in _divide_ideally(batch, curves)]
    # Slow workers were rounded up to one sample: take it from the workers that finish last.
    while sum(shares) > batch:
        longest = max(
            (rank for rank in range(len(shares)) if shares[rank] > smallest),
            key=lambda rank: curves[rank](shares[rank]),
        )
        shares[longest] -= 1
    # Deal the remaining samples, each to the worker that would finish soonest with it.
    next_ends = [
        (curve(share + 1), rank)
        for rank, (curve, share) in enumerate(zip(curves, shares, strict=True))
    ]
    heapq.heapify(next_ends)
    for _ in range(batch - sum(shares)):
        rank = next_ends[0][1]
        shares[rank] += 1
        heapq.heapreplace(next_ends, (curves[rank](shares[rank] + 1), rank))
    return tuple(shares)


def _divide_ideally(
    total: float, curves: Sequence[SpeedCurve], least: float = 0.0
) -> tuple[float, ...]:
    """Fractional shares with which all workers finish at the same time, each at least `least`."""

    def until(seconds: float) -> tuple[float, ...]:
        return tuple(max(curve.units_in(seconds), least) for curve in curves)

    # Bisect for the time at which all workers together have done `total` units. It is at most the
    # time that the slowest would need alone.
    low, high = 0.0, max(curve(total) for curve in curves)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if sum(until(middle)) < total:
            low = middle
        else:
            high = middle
    return until(low)


class SpeedShares:
    """A policy of shares by speed: samples of a global batch -> samples of each rank.

    Args:
        curves: Speed of each rank.
        per_sample: Units of a usual sample. Default: 1.
    """

    def __init__(self, curves: Sequence[SpeedCurve], per_sample: float = 1.0) -> None:
        self.curves, self.per_sample = tuple(curves), per_sample
        self._by_sample = [SpeedCurve(curve.fixed, curve.per_unit * per_sample) for curve in curves]
        self._balanced = lru_cache(maxsize=128)(self._balance_samples)

    def __call__(self, batch: int) -> tuple[int, ...]:
        """Divide a batch of this number of samples."""
        return self._balanced(batch)

    def _balance_samples(self, batch: int) -> tuple[int, ...]:
        return balance_shares(batch, self._by_sample)

    def parts(self, total: float) -> tuple[float, ...]:
        """Divide `total` units into ideal, fractional parts.

        Each rank gets at least a usual sample if there are enough: the speed of a rank without
        samples isn't measured, so it would never get any again.
        """
        size = len(self.curves)
        least = (
            min(self.per_sample, total / size) if round(total / self.per_sample) >= size else 0.0
        )
        ideal = _divide_ideally(total, self.curves, least)
        ideal_sum = math.fsum(ideal)
        return (
            tuple(part * total / ideal_sum for part in ideal)
            if ideal_sum > 0
            else tuple(total / len(ideal) for _ in ideal)
        )


class WorkerSpeeds:
    """Curves of all measured workers by their numbers (`Agreement.origins`), and their hosts."""

    def __init__(self) -> None:
        self.measured: dict[int, tuple[str, SpeedCurve]] = {}  # host and curve, by number
        self.per_sample = 1.0  # units of a usual sample

    def record_speeds(
        self,
        origins: Sequence[int],
        hosts: Sequence[str],
        curves: Sequence[SpeedCurve],
        per_sample: float = 1.0,
    ) -> None:
        """Record the speeds of the present workers.

        Args:
            origins: Number of each worker in the run.
            hosts: Host of each worker.
            curves: Speed of each worker.
            per_sample: Units of a usual sample. Default: 1.
        """
        self.per_sample = per_sample
        self.measured.update(
            {
                origin: (host, curve)
                for origin, host, curve in zip(origins, hosts, curves, strict=True)
            }
        )

    def curves_of(
        self, origins: Sequence[int], hosts: Sequence[str]
    ) -> tuple[SpeedCurve, ...] | None:
        """Look up the curves of the present workers; None if nothing was measured.

        A worker that has just joined gets the mean speed of the workers that have left its host; if
        there are none, of all on its host; if there are none, of all.
        """
        if not self.measured:
            return None
        return tuple(
            self._guess_curve(origin, host, origins)
            for origin, host in zip(origins, hosts, strict=True)
        )

    def _guess_curve(self, origin: int, host: str, origins: Sequence[int]) -> SpeedCurve:
        """Look up a worker's curve, or guess it by the workers that are most similar."""
        if origin in self.measured:
            return self.measured[origin][1]
        on_host = {other: curve for other, (name, curve) in self.measured.items() if name == host}
        departed = [curve for other, curve in on_host.items() if other not in origins]
        similar = (
            departed or list(on_host.values()) or [curve for _, curve in self.measured.values()]
        )
        return SpeedCurve(
            sum(curve.fixed for curve in similar) / len(similar),
            sum(curve.per_unit for curve in similar) / len(similar),
        )

    def state_dict(self, origins: Sequence[int]) -> dict[str, Any]:
        """State for `load_state_dict`; `origins` are the present workers."""
        curves = [
            [origin, host, curve.fixed, curve.per_unit]
            for origin, (host, curve) in sorted(self.measured.items())
        ]
        return {"origins": list(origins), "curves": curves, "per_sample": self.per_sample}

    def load_state_dict(self, state: Mapping[str, Any], origins: Sequence[int]) -> None:
        """Load saved speeds, by rank, if the number of workers is the same."""
        if len(state["origins"]) != len(origins):
            return
        self.per_sample = state["per_sample"]
        # Workers have new numbers in this run. Speeds of workers that had left before the state was
        # saved keep their numbers, unless a present worker has the same one.
        new_origins = dict(zip(state["origins"], origins, strict=True))
        departed = {origin for origin, *_ in state["curves"]} - set(new_origins) - set(origins)
        self.measured = {
            new_origins.get(origin, origin): (host, SpeedCurve(fixed, per_unit))
            for origin, host, fixed, per_unit in state["curves"]
            if origin in new_origins or origin in departed
        }
