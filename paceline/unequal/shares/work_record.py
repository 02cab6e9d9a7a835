"""Work of each worker in each step, merged into blocks that are long enough to be compared.

step       1    2    3    4    5    6    7
rank 0    20   21   20   20   19   21   20  ms
rank 1    20   70   21   72   20   70   71  ms
block     [------------------] [-----------

A processor with half a quota (rank 1) stands still for a part of each 100 ms. Its steps jump, and
only their mean over some time is its speed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from paceline.data.balance import SpeedCurve

BLOCK: Final = 0.2  # seconds of steps that are taken as one, at least: two periods of a quota
LONGEST: Final = 48  # blocks that are looked at


class StepWork(NamedTuple):
    """A step: units and seconds of own work in a turn, of each worker; seconds of the whole
    step.
    """

    units: tuple[float, ...]
    seconds: tuple[float, ...]
    whole: float
    turns: int = 1


class WorkBlock(NamedTuple):
    """Several steps: means in a turn of units and of seconds of own work, of each worker, and
    what its curve says of those units.
    """

    units: tuple[float, ...]
    seconds: tuple[float, ...]
    expected: tuple[float, ...]
    whole: float  # seconds of a turn, with exchange and waiting


class WorkMeans(NamedTuple):
    """Means over blocks, of each worker: units, seconds, how many times as long as its curve it
    takes, and the error of that.
    """

    units: tuple[float, ...]
    slowness: tuple[float, ...]
    errors: tuple[float, ...]
    whole: float


class WorkRecord:
    """Blocks of steps with the same shares, and the noise from block to block."""

    def __init__(self, size: int) -> None:
        self.blocks: deque[WorkBlock] = deque(maxlen=LONGEST)
        self.total = 0  # blocks since the last `clear`
        self._steps: list[StepWork] = []
        # from block to block, as parts of them
        self._jumps: deque[tuple[float, ...]] = deque(maxlen=LONGEST)
        self._size = size

    def forget_steps(self) -> None:
        """Forget what was done; the noise is remembered."""
        self.blocks.clear()
        self._steps, self.total = [], 0

    def add_step(self, step: StepWork, curves: Sequence[SpeedCurve]) -> None:
        """Add a step of workers that have these curves.

        One in which some worker had nothing to do tells nothing.
        """
        if min(step.units) <= 0 or min(step.seconds) <= 0:
            return
        self._steps.append(step)
        if sum(each.whole for each in self._steps) < BLOCK:
            return
        steps, self._steps = self._steps, []
        turns = sum(each.turns for each in steps)
        units, seconds = (
            tuple(
                sum(part * each.turns for part, each in zip(column, steps, strict=True)) / turns
                for column in zip(*rows, strict=True)
            )
            for rows in ([each.units for each in steps], [each.seconds for each in steps])
        )
        expected = tuple(curve(part) for curve, part in zip(curves, units, strict=True))
        block = WorkBlock(units, seconds, expected, sum(each.whole for each in steps) / turns)
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

        Steps in which the speed changes count little.
        """
        jumps = [jump[rank] for jump in self._jumps]
        return math.inf if len(jumps) < 3 else sum(jumps) / len(jumps) * math.sqrt(math.pi) / 2

    def mean_work(self, count: int) -> WorkMeans:
        """Means of the last `count` blocks.

        Of many blocks, the most unusual ones are left out: an evaluation, a checkpoint.
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
    return block.seconds[rank] / block.expected[rank]


def _find_jump(one: float, other: float) -> float:
    return 2 * abs(one - other) / (one + other)


def _trim_values(values: list[float]) -> float:
    out = len(values) // 8
    kept = sorted(values)[out : len(values) - out]
    return sum(kept) / len(kept)
