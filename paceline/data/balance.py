"""Shares by speed, as plain data: how long each worker takes for so many units, and the split whose
slowest worker is soonest done.

seconds              curve of rank 0: fixed 10 ms, then 2 ms for a sample        batch 45
 |          . rank 1       curve of rank 1: fixed 10 ms, then 4 ms               30 -> 70 ms
 |     .    . rank 0                                                             15 -> 70 ms
 +-----------> units

Units are samples, or what a loader's samples cost.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from paceline.errors import DataError

_HALVINGS: Final = 100  # of an interval of seconds, after which floats can't tell its ends apart


@dataclass(frozen=True)
class SpeedCurve:
    """Seconds of a worker's turn: `fixed`, and `per_unit` for each unit.

    Raises `DataError` for a worker without speed.
    """

    fixed: float
    per_unit: float

    def __post_init__(self) -> None:
        if not (0 < self.per_unit < math.inf and 0 <= self.fixed < math.inf):
            raise DataError(
                f"{self.per_unit} s for a sample, and {self.fixed} s besides, is no speed: "
                "leave out a worker that doesn't move"
            )

    def __call__(self, units: float) -> float:
        """Seconds of a turn with this number of units."""
        return self.fixed + self.per_unit * units

    def units(self, seconds: float) -> float:
        """Number of units that are done in this number of seconds."""
        return max((seconds - self.fixed) / self.per_unit, 0.0)

    def scaled(self, factor: float) -> SpeedCurve:
        """Return the curve of a worker that takes `factor` times as long for everything."""
        return SpeedCurve(self.fixed * factor, self.per_unit * factor)


def balance(batch: int, curves: Sequence[SpeedCurve]) -> tuple[int, ...]:
    """Whole shares of `batch` samples that let the slowest worker finish as early as possible.

    Each worker has a sample if there are enough, as a worker without any runs on one all the same.
    """
    everybody = int(batch >= len(curves))
    shares = [max(int(part), everybody) for part in _parts(batch, curves)]
    while sum(shares) > batch:  # slow workers have got a sample that others have to give
        longest = max(
            (rank for rank in range(len(shares)) if shares[rank] > everybody),
            key=lambda rank: curves[rank](shares[rank]),
        )
        shares[longest] -= 1
    waiting = [
        (curve(share + 1), rank)
        for rank, (curve, share) in enumerate(zip(curves, shares, strict=True))
    ]
    heapq.heapify(waiting)
    for _ in range(batch - sum(shares)):
        rank = waiting[0][1]
        shares[rank] += 1
        heapq.heapreplace(waiting, (curves[rank](shares[rank] + 1), rank))
    return tuple(shares)


def _parts(total: float, curves: Sequence[SpeedCurve], least: float = 0.0) -> tuple[float, ...]:
    """Fractional parts with which all workers finish at the same time, each at least `least`."""

    def until(seconds: float) -> tuple[float, ...]:
        return tuple(max(curve.units(seconds), least) for curve in curves)

    low, high = 0.0, max(curve(total) for curve in curves)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if sum(until(middle)) < total:
            low = middle
        else:
            high = middle
    return until(low)


class SpeedShares:
    """A policy of shares by speed: samples of a global batch -> those of each rank.

    `per_sample`: units of a usual sample.
    """

    def __init__(self, curves: Sequence[SpeedCurve], per_sample: float = 1.0) -> None:
        self.curves, self.per_sample = tuple(curves), per_sample
        self._by_sample = [SpeedCurve(curve.fixed, curve.per_unit * per_sample) for curve in curves]
        self._balanced = lru_cache(maxsize=128)(self._balance)

    def __call__(self, batch: int) -> tuple[int, ...]:
        """Return the shares of a batch."""
        return self._balanced(batch)

    def _balance(self, batch: int) -> tuple[int, ...]:
        return balance(batch, self._by_sample)

    def parts(self, total: float) -> tuple[float, ...]:
        """Return the ideal part of each rank in `total` units, which need not be whole.

        Everybody has that of a usual sample if there are enough, as in `balance`: who has nothing
        to do is not measured, and never comes back.
        """
        size = len(self.curves)
        least = (
            min(self.per_sample, total / size) if round(total / self.per_sample) >= size else 0.0
        )
        found = _parts(total, self.curves, least)
        whole = math.fsum(found)
        return (
            tuple(part * total / whole for part in found)
            if whole > 0
            else tuple(total / len(found) for _ in found)
        )


class WorkerSpeeds:
    """Curves of all measured workers by their numbers (`Agreement.origins`), and their hosts."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[str, SpeedCurve]] = {}
        self.per_sample = 1.0  # units

    def learn(
        self,
        origins: Sequence[int],
        hosts: Sequence[str],
        curves: Sequence[SpeedCurve],
        per_sample: float = 1.0,
    ) -> None:
        """Note the speeds of the present workers, and the number of units of a usual sample."""
        self.per_sample = per_sample
        self.known.update(
            {
                origin: (host, curve)
                for origin, host, curve in zip(origins, hosts, curves, strict=True)
            }
        )

    def of(self, origins: Sequence[int], hosts: Sequence[str]) -> tuple[SpeedCurve, ...] | None:
        """Return the curves of the present workers; None where nothing was measured.

        A newcomer is as fast as those who were on its host, and are gone; else as the others there;
        else as all are in the mean.
        """
        if not self.known:
            return None
        return tuple(
            self._guess(origin, host, origins) for origin, host in zip(origins, hosts, strict=True)
        )

    def _guess(self, origin: int, host: str, origins: Sequence[int]) -> SpeedCurve:
        if origin in self.known:
            return self.known[origin][1]
        there = {other: curve for other, (name, curve) in self.known.items() if name == host}
        gone = [curve for other, curve in there.items() if other not in origins]
        alike = gone or list(there.values()) or [curve for _, curve in self.known.values()]
        return SpeedCurve(
            sum(curve.fixed for curve in alike) / len(alike),
            sum(curve.per_unit for curve in alike) / len(alike),
        )

    def state_dict(self, origins: Sequence[int]) -> dict[str, Any]:
        """Return the speeds for `load_state_dict`; `origins` are the present workers."""
        curves = [
            [origin, host, curve.fixed, curve.per_unit]
            for origin, (host, curve) in sorted(self.known.items())
        ]
        return {"origins": list(origins), "curves": curves, "per_sample": self.per_sample}

    def load_state_dict(self, state: Mapping[str, Any], origins: Sequence[int]) -> None:
        """Begin with saved speeds if the number of workers is the same; they go by rank."""
        if len(state["origins"]) != len(origins):
            return
        self.per_sample = state["per_sample"]
        now = dict(zip(state["origins"], origins, strict=True))
        gone = {origin for origin, *_ in state["curves"]} - set(now) - set(origins)
        self.known = {
            now.get(origin, origin): (host, SpeedCurve(fixed, per_unit))
            for origin, host, fixed, per_unit in state["curves"]
            if origin in now or origin in gone
        }
