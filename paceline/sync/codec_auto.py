"""`codec="auto"`: measure some steps with exact sums, then use a codec if it is predicted to pay.

steps      0 1 2 3 | 4 ... 11          | 12
           exact   | exact, measured   | each candidate sums one real bucket and is timed;
                                       | then all workers choose by the predicted step times
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Size, Tensor

from paceline.codec.codec import Codec, Wire
from paceline.comm.group_protocol import Group
from paceline.sync.codec_cost import BucketTrip, ExactRate, ExchangeCost, exposed, sent_by, timed

SKIPPED, MEASURED = 4, 8  # steps before the measurement, and in it
GAIN = 1.1  # smallest predicted speed-up over exact sums for which a codec is used


@dataclass(frozen=True)
class CodecTrial:
    """Measured cost of a codec for one bucket on this worker."""

    numel: int  # elements of the bucket
    before: float  # seconds of this processor before the first message
    after: float  # seconds of this processor from then on
    sent: float  # bytes
    stages: int  # waits for other workers

    def cost(self, numel: int, rate: ExactRate) -> ExchangeCost:
        """Predict the cost of a bucket of `numel` elements.

        The link is assumed to be as fast for coded bytes as for those of exact sums.
        """
        relative_size = numel / self.numel
        link = self.stages * rate.latency + self.sent * relative_size / rate.link
        return ExchangeCost(self.before * relative_size, link, self.after * relative_size)


def attempt(codec: Codec, flat: Tensor, shapes: Sequence[Size], group: Group) -> CodecTrial:
    """Sum a bucket twice with a codec, and return the faster trial. Collective.

    The sums are dropped, and so is the codec's state.
    """
    trials = []
    for _ in range(2):
        trip, before = BucketTrip(0, flat.numel()), sent_by(group)
        exchange = timed(
            codec.sum(flat, shapes, codec.init(shapes, flat.device), Wire((group,) * codec.stages)),
            trip,
        )
        # The exchange yields each work it waits for, and takes its result.
        result: Any = None
        with contextlib.suppress(StopIteration):
            while True:
                result = exchange.send(result).wait()
        first, *rest = trip.coding
        trials.append(
            CodecTrial(flat.numel(), first, sum(rest), sent_by(group) - before, len(rest))
        )
    return min(trials, key=lambda trial: trial.before + trial.after)


class ExactSteps:
    """Steps with exact sums, as one worker measured them."""

    def __init__(self) -> None:
        self.steps: list[float] = []  # seconds from the end of one step to the end of the next
        self.shown: list[float] = []  # per step: seconds that backward waited for buckets
        # Per step: each bucket's index, and seconds from when it left to when it was needed.
        self.ready: list[list[tuple[int, float]]] = []
        # The same for the step under way, and when it began.
        self._shown = 0.0
        self._ready: list[tuple[int, float]] = []
        self._began: float | None = None

    def exchanged(self, shown: float, ready: Sequence[tuple[int, float]]) -> None:
        """Record a wait for buckets.

        Args:
            shown: Seconds of the wait.
            ready: Index of each bucket, and seconds from when it left to the begin of the wait.
        """
        self._shown += shown
        self._ready += ready

    def over(self) -> bool:
        """End a step, and say whether enough steps have been measured.

        Steps that sent nothing aren't counted.
        """
        now = time.perf_counter()
        if self._ready and self._began is not None:
            self.steps.append(now - self._began)
            self.shown.append(self._shown)
            self.ready.append(self._ready)
        self._shown, self._ready, self._began = 0.0, [], now
        return len(self.steps) >= SKIPPED + MEASURED

    @property
    def step(self) -> float:
        """Median seconds of a measured step."""
        return statistics.median(self.steps[SKIPPED:])


def predict(record: ExactSteps, trial: CodecTrial, sizes: Sequence[int], rate: ExactRate) -> float:
    """Predict the seconds of a step with a codec.

    Args:
        record: Measured steps with exact sums.
        trial: Measured cost of the codec.
        sizes: Number of elements of each bucket.
        rate: Measured rate of exact sums on the link.
    """
    differences = []
    for shown, ready in zip(record.shown[SKIPPED:], record.ready[SKIPPED:], strict=True):
        costs = [trial.cost(sizes[index], rate) for index, _ in ready]
        # Coding takes processor time from the model, so the step gets longer by at least as much.
        coding = sum(cost.before + cost.after for cost in costs)
        coded_wait = exposed([-seconds_ahead for _, seconds_ahead in ready], costs, 0.0)
        differences.append(max(coded_wait, coding) - shown)
    return record.step + statistics.median(differences)
