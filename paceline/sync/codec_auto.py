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
from paceline.sync.codec_cost import (
    BucketTrip,
    ExactRate,
    ExchangeCost,
    count_sent_bytes,
    exposed_seconds,
    time_coding,
)

SKIPPED_STEPS, MEASURED_STEPS = 4, 8  # steps before the measurement, and in it
MIN_GAIN = 1.1  # smallest predicted speed-up over exact sums for which a codec is used


@dataclass(frozen=True)
class CodecTrial:
    """Measured cost of a codec for one bucket on this worker."""

    numel: int  # elements of the bucket
    before: float  # seconds of this processor before the first message
    after: float  # seconds of this processor from then on
    sent: float  # bytes
    stages: int  # waits for other workers

    def predict_cost(self, numel: int, rate: ExactRate) -> ExchangeCost:
        """Predict the cost of a bucket of `numel` elements.

        The link is assumed to be as fast for coded bytes as for those of exact sums.
        """
        relative_size = numel / self.numel
        link = self.stages * rate.latency + self.sent * relative_size / rate.link_bytes_per_second
        return ExchangeCost(self.before * relative_size, link, self.after * relative_size)


def try_codec(codec: Codec, flat: Tensor, shapes: Sequence[Size], group: Group) -> CodecTrial:
    """Sum a bucket twice with a codec, and return the faster trial. Collective.

    The sums are dropped, and so is the codec's state.
    """
    trials = []
    for _ in range(2):
        trip, before = BucketTrip(0, flat.numel()), count_sent_bytes(group)
        exchange = time_coding(
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
            CodecTrial(flat.numel(), first, sum(rest), count_sent_bytes(group) - before, len(rest))
        )
    return min(trials, key=lambda trial: trial.before + trial.after)


class ExactSteps:
    """Steps with exact sums, as one worker measured them."""

    def __init__(self) -> None:
        self.measured_seconds: list[
            float
        ] = []  # seconds from the end of one step to the end of the next
        self.waited_seconds: list[float] = []  # per step: seconds that backward waited for buckets
        # Per step: each bucket's index, and seconds from when it left to when it was needed.
        self.departures: list[list[tuple[int, float]]] = []
        # The same for the step under way, and when it began.
        self._waited_now = 0.0
        self._departures_now: list[tuple[int, float]] = []
        self._step_began: float | None = None

    def record_wait(self, shown: float, ready: Sequence[tuple[int, float]]) -> None:
        """Record a wait for buckets.

        Args:
            shown: Seconds of the wait.
            ready: Index of each bucket, and seconds from when it left to the begin of the wait.
        """
        self._waited_now += shown
        self._departures_now += ready

    def end_step(self) -> bool:
        """End a step, and say whether enough steps have been measured.

        Steps that sent nothing aren't counted.
        """
        now = time.perf_counter()
        if self._departures_now and self._step_began is not None:
            self.measured_seconds.append(now - self._step_began)
            self.waited_seconds.append(self._waited_now)
            self.departures.append(self._departures_now)
        self._waited_now, self._departures_now, self._step_began = 0.0, [], now
        return len(self.measured_seconds) >= SKIPPED_STEPS + MEASURED_STEPS

    @property
    def step_seconds(self) -> float:
        """Median seconds of a measured step."""
        return statistics.median(self.measured_seconds[SKIPPED_STEPS:])


def predict_step_seconds(
    record: ExactSteps, trial: CodecTrial, sizes: Sequence[int], rate: ExactRate
) -> float:
    """Predict the seconds of a step with a codec.

    Args:
        record: Measured steps with exact sums.
        trial: Measured cost of the codec.
        sizes: Number of elements of each bucket.
        rate: Measured rate of exact sums on the link.
    """
    differences = []
    for shown, ready in zip(
        record.waited_seconds[SKIPPED_STEPS:], record.departures[SKIPPED_STEPS:], strict=True
    ):
        costs = [trial.predict_cost(sizes[index], rate) for index, _ in ready]
        # Coding takes processor time from the model, so the step gets longer by at least as much.
        coding = sum(cost.before + cost.after for cost in costs)
        coded_wait = exposed_seconds([-seconds_ahead for _, seconds_ahead in ready], costs, 0.0)
        differences.append(max(coded_wait, coding) - shown)
    return record.step_seconds + statistics.median(differences)
