"""Record of the work of each worker, merged from steps into blocks long enough to compare.

step       1    2    3    4    5    6    7
rank 0    20   21   20   20   19   21   20  ms
rank 1    20   70   21   72   20   70   71  ms
block     [------------------] [-----------

A worker with a quota of half a core (rank 1) is held for a part of each period of 100 ms. The times
of its steps jump, so only their mean over a block shows its speed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from paceline.data.balance import SpeedCurve

# seconds of steps in a block, at least: two periods of a quota
BLOCK: Final = 0.2
LONGEST: Final = 48  # blocks that are remembered


class StepWork(NamedTuple):
    """Units and seconds of own work of each worker in a turn, and seconds of the whole step."""

    units: tuple[float, ...]
    seconds: tuple[float, ...]
    whole: float
    turns: int = 1


class WorkBlock(NamedTuple):
    """Mean work of each worker in a turn, over several steps.

    `expected` has the seconds that each worker's curve predicts for its units.
    """

    units: tuple[float, ...]
    seconds: tuple[float, ...]
    expected: tuple[float, ...]
    whole: float  # seconds of a turn, with exchange and waiting


class WorkMeans(NamedTuple):
    """Means over blocks, for each worker.

    `slowness` is the measured time divided by the time that the worker's curve predicts. `errors`
    has the standard error of the slowness, as a part of it.
    """

    units: tuple[float, ...]
    slowness: tuple[float, ...]
    errors: tuple[float, ...]
    whole: float  # seconds of a turn, with exchange and waiting


class WorkRecord:
    """Blocks of steps with the same shares, and the noise from block to block."""

    def __init__(self, size: int) -> None:
        self.blocks: deque[WorkBlock] = deque(maxlen=LONGEST)
        self.total = 0  # blocks since the last `forget_steps`
        self._steps: list[StepWork] = []
        # Change of each worker's slowness from one block to the next, as a part of it.
        self._jumps: deque[tuple[float, ...]] = deque(maxlen=LONGEST)
        self._size = size

    def forget_steps(self) -> None:
        """Forget all steps and blocks, but remember the noise."""
        self.blocks.clear()
        self._steps, self.total = [], 0

    def add_step(self, step: StepWork, curves: Sequence[SpeedCurve]) -> None:
        """Add a step, and close the block if it is long enough.

        `curves` has the curve of each worker. A step in which a worker had nothing to do is
        skipped, as it says nothing about that worker's speed.
        """
        if min(step.units) <= 0 or min(step.seconds) <= 0:
            return
        self._steps.append(step)
        if sum(each.whole for each in self._steps) < BLOCK:
            return

        # Steps have different numbers of turns, so each counts by its turns in the mean.
        steps, self._steps = self._steps, []
        turns = sum(each.turns for each in steps)
        units, seconds = (
            tuple(
                sum(value * each.turns for value, each in zip(column, steps, strict=True)) / turns
                for column in zip(*rows, strict=True)
            )
            for rows in ([each.units for each in steps], [each.seconds for each in steps])
        )
        expected = tuple(curve(count) for curve, count in zip(curves, units, strict=True))
        block = WorkBlock(units, seconds, expected, sum(each.whole for each in steps) / turns)

        # Neighbouring blocks differ by noise alone, unless the speed has changed between them.
        if self.blocks:
            before = self.blocks[-1]
            self._jumps.append(
                tuple(
                    _find_jump(_compute_slowness(before, rank), _compute_slowness(block, rank))
                    for rank in range(self._size)
                )
            )
        self.blocks.append(block)
        self.total += 1

    def noise_of(self, rank: int) -> float:
        """Standard deviation of a worker's blocks, as a part of their mean.

        It is computed from the differences of neighbouring blocks, so a change of speed counts
        only once. It is infinite with fewer than three differences.
        """
        jumps = [jump[rank] for jump in self._jumps]
        # Two values with standard deviation s differ by 2 * s / sqrt(pi) in the mean.
        return math.inf if len(jumps) < 3 else sum(jumps) / len(jumps) * math.sqrt(math.pi) / 2

    def mean_work(self, count: int) -> WorkMeans:
        """Compute the means of the last `count` blocks.

        With eight blocks or more, the most unusual ones are left out: an evaluation or a checkpoint
        disturbs a few of them.
        """
        blocks = list(self.blocks)[-count:]
        slowness = tuple(
            _trim_values([_compute_slowness(block, rank) for block in blocks])
            for rank in range(self._size)
        )
        units = tuple(
            sum(block.units[rank] for block in blocks) / len(blocks) for rank in range(self._size)
        )
        errors = tuple(self.noise_of(rank) / math.sqrt(len(blocks)) for rank in range(self._size))
        return WorkMeans(units, slowness, errors, _trim_values([block.whole for block in blocks]))


def _compute_slowness(block: WorkBlock, rank: int) -> float:
    """Seconds of a worker, divided by the seconds that its curve predicts."""
    return block.seconds[rank] / block.expected[rank]


def _find_jump(one: float, other: float) -> float:
    """Difference of two values, as a part of their mean."""
    return 2 * abs(one - other) / (one + other)


def _trim_values(values: list[float]) -> float:
    """Mean of the values without the smallest and the largest eighth."""
    cut = len(values) // 8
    middle = sorted(values)[cut : len(values) - cut]
    return sum(middle) / len(middle)
