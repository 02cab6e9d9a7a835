"""Decides, from what workers did in each step, when shares change and by which speeds; the same on
all workers with the same input.

calibration    equal shares -> speeds in proportion -> other shares, which tell fixed costs from
               those of a unit -> curves
afterwards     a worker takes 1.4 times as long as its curve says, for some blocks of steps: would
               other shares gain enough?
                  no, or the noise could be it     nothing
                  yes                              look at as many blocks again; yes again: the
                                                   curve is scaled, shares change
               where a change hasn't brought half of what it should, the next one has to bring twice
               as much: nothing swings
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from paceline.data.balance import SpeedCurve, SpeedShares, balance_shares
from paceline.unequal.shares.work_record import StepWork, WorkMeans, WorkRecord

# blocks that are looked at, and what a change has to gain, as a part of a step
WINDOWS: Final = ((3, 0.1), (12, 0.04), (48, 0.025))
WARM: Final = 2  # steps that are left out at the start, and SETTLE after each change
SETTLE: Final = 1
# blocks of a calibration: at least, if it's noisy, and before it is given up
FEWEST, MANY, TOO_MANY = 4, 12, 24
NARROW, WIDE = 0.02, 0.05  # error of a speed: small enough for all, and too large for any use
WORTH: Final = 0.02  # what the second change of a calibration has to gain
LEVER: Final = 0.1  # units have to differ by such a part to tell fixed costs from others
MOST_FIXED: Final = 0.7  # of a turn
KEPT: Final = 0.5  # part of a gain that a change has to bring, to have been right
FORGIVEN: Final = 300  # blocks after which a change that wasn't right is forgotten

Phase = Literal["equal", "lever", "steady"]


class NewShares(NamedTuple):
    """Other shares: curves of all workers, and the seconds of a turn before and after."""

    curves: tuple[SpeedCurve, ...]
    before: float
    after: float


class Balancer:
    """Follows the speeds of `size` workers; `curves` where they are known from before."""

    def __init__(self, size: int, curves: Sequence[SpeedCurve] | None = None) -> None:
        self.curves = tuple(curves) if curves is not None else (SpeedCurve(0.0, 1.0),) * size
        self._per_sample: float | None = None
        self.phase: Phase = "equal" if curves is None else "steady"
        self.disturbed = 0  # how many calibrations were given up
        self._record = WorkRecord(size)
        self._leave_out = WARM
        # units and seconds before the change that is to be the lever
        self._first: tuple[Sequence[float], Sequence[float]] = ((), ())
        self._levered = curves is not None  # fixed costs are known
        # the window in which a change would have gained, and the block at which it did
        self._steps_seen: tuple[int, int] | None = None
        self._promised: NewShares | None = None  # by the last change
        self._failed_changes = 0  # changes that haven't brought what they should
        # the block after the last change from which it counts how long there was no other
        self._steps_since_change = 0
        # the largest of several is noise more often
        self._deviations = 1.5 + math.sqrt(2 * math.log(max(size, 2)))

    def take_steps(self, steps: Sequence[StepWork]) -> None:
        """Take in steps that are over."""
        for step in steps:
            if self._leave_out:
                self._leave_out -= 1
            else:
                self._record.add_step(step, self.curves)

    def decide_speeds(self, *, per_sample: float | None = None) -> NewShares | None:
        """Speeds that shares follow from now on; None if shares stay.

        `per_sample` is the number of units of a usual sample if samples are dealt by cost, and
        parts need not be whole; else None.
        """
        self._per_sample = per_sample
        return self._calibrate_curves() if self.phase != "steady" else self._follow_speeds()

    # ---- calibration

    def _calibrate_curves(self) -> NewShares | None:
        count = self._record.total
        if count < FEWEST:
            return None
        means = self._record.mean_work(count)
        error = max(means.errors)
        if self.phase == "lever":
            return self._fit_curves(means) if error <= NARROW or count >= MANY else None
        curves = self._scale_curves(means)
        split = self._propose_shares(curves, means)
        if split is not None and split[1] >= max(WORTH, self._deviations * error):
            return self._apply_shares(split[0], means)
        if error <= NARROW or (count >= MANY and error <= WIDE):
            self._treat_as_equal(curves)
        elif count >= TOO_MANY:
            self.disturbed += 1
            self._record.forget_steps()
        return None

    def _treat_as_equal(self, curves: tuple[SpeedCurve, ...]) -> None:
        """Take workers for equally fast, as far as can be told."""
        mean = sum(curve.per_unit for curve in curves) / len(curves)
        self.curves, self.phase = (SpeedCurve(0.0, mean),) * len(curves), "steady"
        self._record.forget_steps()

    def _fit_curves(self, means: WorkMeans) -> NewShares | None:
        """Find the curves that go through both measurements, and go by them."""
        units, seconds = self._first
        now = [
            curve(part) * slow
            for curve, part, slow in zip(self.curves, means.units, means.slowness, strict=True)
        ]
        points = zip(units, seconds, means.units, now, strict=True)
        found = [_fit_line(*point) for point in points]
        fixed = sorted(
            curve.fixed / curve(part)
            for curve, part in zip(found, units, strict=True)
            if curve is not None
        )
        if fixed:
            self._levered, usual = True, fixed[len(fixed) // 2]
            rest = zip(found, means.units, now, strict=True)
            curves = tuple(
                curve or SpeedCurve(usual * last, (1 - usual) * last / part)
                for curve, part, last in rest
            )
        else:
            curves = self._scale_curves(means)
        split = self._propose_shares(curves, means)
        return None if split is None else self._apply_shares(split[0], means)

    # ---- afterwards

    def _follow_speeds(self) -> NewShares | None:
        record = self._record
        self._check_last_change()
        if self._steps_seen is not None:
            window, at = self._steps_seen
            if record.total - at < window:
                return None
            self._steps_seen = None
            split = self._find_gain(window)
            return (
                None if split is None else self._apply_shares(split, self._record.mean_work(window))
            )
        for window, _ in WINDOWS:
            if record.total >= window and self._find_gain(window) is not None:
                self._steps_seen = window, record.total
                break
        return None

    def _check_last_change(self) -> None:
        """Find out whether the last change has brought what it should."""
        promised, total = self._promised, self._record.total
        if promised is not None and total >= FEWEST:
            self._promised = None
            brought = promised.before - self._record.mean_work(FEWEST).whole
            self._failed_changes = min(
                self._failed_changes + (brought < KEPT * (promised.before - promised.after)), 3
            )
        if self._failed_changes and total - self._steps_since_change >= FORGIVEN:
            self._steps_since_change, self._failed_changes = total, self._failed_changes - 1

    def _find_gain(self, window: int) -> NewShares | None:
        """Change suggested by the last blocks, if it gains enough; None if that may be noise."""
        means = self._record.mean_work(window)
        found = self._propose_shares(self._scale_curves(means), means)
        least = max(
            dict(WINDOWS)[window] * 2**self._failed_changes, self._deviations * max(means.errors)
        )
        return found[0] if found is not None and found[1] >= least else None

    # ---- both

    def _scale_curves(self, means: WorkMeans) -> tuple[SpeedCurve, ...]:
        return tuple(
            curve.scaled_by(factor)
            for curve, factor in zip(self.curves, means.slowness, strict=True)
        )

    def _propose_shares(
        self, curves: tuple[SpeedCurve, ...], means: WorkMeans
    ) -> tuple[NewShares, float] | None:
        """Change to these curves, and its gain as a part of a step; None if nothing is dealt."""
        total, usual = sum(means.units), self._per_sample
        if round(total / (usual or 1.0)) < 1:
            return None
        parts = (
            SpeedShares(curves, per_sample=usual).parts(total)
            if usual
            else balance_shares(round(total), curves)
        )
        now = max(curve(units) for curve, units in zip(curves, means.units, strict=True))
        then = max(curve(units) for curve, units in zip(curves, parts, strict=True))
        whole = max(means.whole, now)
        return NewShares(curves, whole, whole - now + then), (now - then) / whole

    def _apply_shares(self, split: NewShares, means: WorkMeans) -> NewShares:
        """Use these curves; the first change also shows how time depends on units.

        Before it, workers have been measured with other numbers of units.
        """
        steady = self._levered or self.phase == "lever"
        self._promised = split if self.phase == "steady" else None
        self._first = (
            means.units,
            [curve(units) for curve, units in zip(split.curves, means.units, strict=True)],
        )
        self.curves, self.phase, self._leave_out, self._steps_since_change = (
            split.curves,
            "steady" if steady else "lever",
            SETTLE,
            0,
        )
        self._record.forget_steps()
        return split


def _fit_line(
    units: float, seconds: float, units_now: float, seconds_now: float
) -> SpeedCurve | None:
    """Curve through the later of two measurements, towards the earlier one if that makes sense."""
    if abs(units_now - units) < LEVER * units:
        return None
    slope = (seconds_now - seconds) / (units_now - units)
    slope = min(max(slope, (1 - MOST_FIXED) * seconds_now / units_now), seconds_now / units_now)
    return SpeedCurve(max(seconds_now - slope * units_now, 0.0), slope)
