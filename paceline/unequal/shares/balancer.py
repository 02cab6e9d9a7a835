"""Decides when shares change and by which speeds, from the work of all workers in each step.

The decision is the same on all workers with the same input.

calibration    equal shares -> speeds in proportion -> other shares, which separate fixed costs from
               costs per unit -> curves
afterwards     a worker takes 1.4 times as long as its curve predicts, for some blocks of steps:
               would other shares gain enough?
                  no, or it may be noise     nothing changes
                  yes                        look at as many blocks again; if still yes, the curve
                                             is scaled and shares change
               if a change brings less than half of its predicted gain, the next one has to gain
               twice as much, so that shares don't swing back and forth
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from paceline.data.balance import SpeedCurve, SpeedShares, balance_shares
from paceline.unequal.shares.work_record import StepWork, WorkMeans, WorkRecord

# numbers of blocks that are looked at, and the gain that a change needs, as a part of a step
WINDOWS: Final = ((3, 0.1), (12, 0.04), (48, 0.025))
WARM: Final = 2  # steps that are left out at the start
SETTLE: Final = 1  # steps that are left out after each change
# blocks of a calibration: at least, if step times are noisy, and until it is given up
FEWEST, MANY, TOO_MANY = 4, 12, 24
# error of a speed: up to NARROW it is good enough at once, above WIDE it is of no use
NARROW, WIDE = 0.02, 0.05
WORTH: Final = 0.02  # gain that a change of a calibration needs, as a part of a step
# part by which units have to differ to separate fixed costs from costs per unit
LEVER: Final = 0.1
MOST_FIXED: Final = 0.7  # largest fixed part of a turn
KEPT: Final = 0.5  # part of its predicted gain that a successful change brings
FORGIVEN: Final = 300  # blocks after which a failed change is forgotten

Phase = Literal["equal", "lever", "steady"]


class NewShares(NamedTuple):
    """Curves of all workers for new shares, and the seconds of a turn before and after."""

    curves: tuple[SpeedCurve, ...]
    before: float
    after: float


class Balancer:
    """Follows the speeds of workers, and proposes new shares when they gain enough.

    Args:
        size: Number of workers.
        curves: Curves of all workers from an earlier run; None calibrates them first.
    """

    def __init__(self, size: int, curves: Sequence[SpeedCurve] | None = None) -> None:
        self.curves = tuple(curves) if curves is not None else (SpeedCurve(0.0, 1.0),) * size
        self._per_sample: float | None = None
        self.phase: Phase = "equal" if curves is None else "steady"
        self.disturbed = 0  # number of calibrations that were given up
        self._record = WorkRecord(size)
        self._leave_out = WARM
        # Units and seconds before the change that separates fixed costs from costs per unit.
        self._first: tuple[Sequence[float], Sequence[float]] = ((), ())
        self._levered = curves is not None  # fixed costs are known
        # The window of blocks in which a change would have gained enough, and the total of blocks
        # then.
        self._steps_seen: tuple[int, int] | None = None
        self._promised: NewShares | None = None  # by the last change
        self._failed_changes = 0  # changes that brought too little
        # Total of blocks at the last change, or when a failed change was last forgotten.
        self._steps_since_change = 0
        # The largest of several errors is noise more often than a single one, so with more workers
        # a gain has to exceed more standard deviations.
        self._deviations = 1.5 + math.sqrt(2 * math.log(max(size, 2)))

    def take_steps(self, steps: Sequence[StepWork]) -> None:
        """Take in steps that have ended."""
        for step in steps:
            # The first steps, and those right after a change, aren't typical.
            if self._leave_out:
                self._leave_out -= 1
            else:
                self._record.add_step(step, self.curves)

    def decide_speeds(self, *, per_sample: float | None = None) -> NewShares | None:
        """Decide which speeds shares follow from now on; None if shares stay.

        `per_sample` is the number of units of a usual sample if samples are dealt by cost, so that
        shares needn't be whole numbers; else None.
        """
        self._per_sample = per_sample
        return self._calibrate_curves() if self.phase != "steady" else self._follow_speeds()

    # ---- calibration

    def _calibrate_curves(self) -> NewShares | None:
        """Take the next step of a calibration, if there are enough blocks for it."""
        count = self._record.total
        if count < FEWEST:
            return None
        means = self._record.mean_work(count)
        error = max(means.errors)

        # Second measurement, with other shares than the first: fit a curve through both.
        if self.phase == "lever":
            return self._fit_curves(means) if error <= NARROW or count >= MANY else None

        # First measurement: change shares if that clearly gains, or call workers equally fast.
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
        """End the calibration with the same curve for all workers, as no difference is certain."""
        mean = sum(curve.per_unit for curve in curves) / len(curves)
        self.curves, self.phase = (SpeedCurve(0.0, mean),) * len(curves), "steady"
        self._record.forget_steps()

    def _fit_curves(self, means: WorkMeans) -> NewShares | None:
        """Fit curves through both measurements, and change shares by them if that gains."""
        units, seconds = self._first
        now = [
            curve(count) * slow
            for curve, count, slow in zip(self.curves, means.units, means.slowness, strict=True)
        ]
        points = zip(units, seconds, means.units, now, strict=True)
        fitted = [_fit_line(*point) for point in points]

        # A worker whose share has hardly changed has no curve: it gets the median fixed part.
        fixed_parts = sorted(
            curve.fixed / curve(count)
            for curve, count in zip(fitted, units, strict=True)
            if curve is not None
        )
        if fixed_parts:
            self._levered, fixed_part = True, fixed_parts[len(fixed_parts) // 2]
            latest = zip(fitted, means.units, now, strict=True)
            curves = tuple(
                curve or SpeedCurve(fixed_part * last, (1 - fixed_part) * last / count)
                for curve, count, last in latest
            )
        else:
            curves = self._scale_curves(means)
        split = self._propose_shares(curves, means)
        return None if split is None else self._apply_shares(split[0], means)

    # ---- afterwards

    def _follow_speeds(self) -> NewShares | None:
        """Propose new shares once two windows of blocks in a row say that they gain enough."""
        record = self._record
        self._check_last_change()

        # A window has seen a gain: wait for as many new blocks, and look once more.
        if self._steps_seen is not None:
            window, total_then = self._steps_seen
            if record.total - total_then < window:
                return None
            self._steps_seen = None
            split = self._find_gain(window)
            return (
                None if split is None else self._apply_shares(split, self._record.mean_work(window))
            )

        # Short windows see large gains early, and long windows see small ones.
        for window, _ in WINDOWS:
            if record.total >= window and self._find_gain(window) is not None:
                self._steps_seen = window, record.total
                break
        return None

    def _check_last_change(self) -> None:
        """Compare the last change with its predicted gain, and count it if it failed."""
        promised, total = self._promised, self._record.total
        if promised is not None and total >= FEWEST:
            self._promised = None
            brought = promised.before - self._record.mean_work(FEWEST).whole
            self._failed_changes = min(
                self._failed_changes + (brought < KEPT * (promised.before - promised.after)), 3
            )
        # Failed changes raise the gain that the next one needs, but not for ever.
        if self._failed_changes and total - self._steps_since_change >= FORGIVEN:
            self._steps_since_change, self._failed_changes = total, self._failed_changes - 1

    def _find_gain(self, window: int) -> NewShares | None:
        """Find a change that gains enough by the last blocks; None if the gain may be noise."""
        means = self._record.mean_work(window)
        proposal = self._propose_shares(self._scale_curves(means), means)
        least = max(
            dict(WINDOWS)[window] * 2**self._failed_changes, self._deviations * max(means.errors)
        )
        return proposal[0] if proposal is not None and proposal[1] >= least else None

    # ---- both

    def _scale_curves(self, means: WorkMeans) -> tuple[SpeedCurve, ...]:
        """Present curves, scaled by the slowness of each worker."""
        return tuple(
            curve.scaled_by(factor)
            for curve, factor in zip(self.curves, means.slowness, strict=True)
        )

    def _propose_shares(
        self, curves: tuple[SpeedCurve, ...], means: WorkMeans
    ) -> tuple[NewShares, float] | None:
        """Change to these curves, and its gain as a part of a step; None if nothing is dealt."""
        total, per_sample = sum(means.units), self._per_sample
        if round(total / (per_sample or 1.0)) < 1:
            return None
        new_units = (
            SpeedShares(curves, per_sample=per_sample).parts(total)
            if per_sample
            else balance_shares(round(total), curves)
        )

        # The slowest worker sets the pace. The rest of a turn, such as the exchange, stays.
        now = max(curve(units) for curve, units in zip(curves, means.units, strict=True))
        then = max(curve(units) for curve, units in zip(curves, new_units, strict=True))
        turn = max(means.whole, now)
        return NewShares(curves, turn, turn - now + then), (now - then) / turn

    def _apply_shares(self, split: NewShares, means: WorkMeans) -> NewShares:
        """Use the curves of new shares from now on.

        The first change is also the lever of the calibration: workers were measured with other
        numbers of units before it, so the next measurement shows how time depends on units.
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
    """Fit a curve through the later of two measurements, towards the earlier one.

    The fixed part is between 0 and MOST_FIXED of a turn. None if the units are too much alike.
    """
    if abs(units_now - units) < LEVER * units:
        return None
    slope = (seconds_now - seconds) / (units_now - units)
    slope = min(max(slope, (1 - MOST_FIXED) * seconds_now / units_now), seconds_now / units_now)
    return SpeedCurve(max(seconds_now - slope * units_now, 0.0), slope)
