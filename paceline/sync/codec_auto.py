"""`codec="auto"`: begin exact, measure some steps, and take a codec if a gain is predicted.

steps      0 1 2 3 | 4 ... 11          | 12
           exact   | exact, measured   | every candidate sums one real bucket and is timed;
                                       | then the prediction, and the choice for all workers
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
GAIN = 1.1  # how many times as fast as exact sums a codec must be predicted to be


@dataclass(frozen=True)
class CodecTrial:
    """Cost of a codec for one bucket of `numel` elements: seconds of this processor before and
    after, and bytes that this worker sent.
    """

    numel: int
    before: float
    after: float
    sent: float
    stages: int

    def cost(self, numel: int, rate: ExactRate) -> ExchangeCost:
        """Return the cost of a bucket of so many elements.

        A link takes as long for a byte of a codec as for one of an exact sum.
        """
        part = numel / self.numel
        link = self.stages * rate.latency + self.sent * part / rate.link
        return ExchangeCost(self.before * part, link, self.after * part)


def attempt(codec: Codec, flat: Tensor, shapes: Sequence[Size], group: Group) -> CodecTrial:
    """Try a codec on a bucket, and return the faster of two trials.

    Collective; the result of the sum is dropped.
    """
    tries = []
    for _ in range(2):
        trip, before = BucketTrip(0, flat.numel()), sent_by(group)
        going = timed(
            codec.sum(flat, shapes, codec.init(shapes, flat.device), Wire((group,) * codec.stages)),
            trip,
        )
        result: Any = None
        with contextlib.suppress(StopIteration):
            while True:
                result = going.send(result).wait()
        first, *rest = trip.coding
        tries.append(CodecTrial(flat.numel(), first, sum(rest), sent_by(group) - before, len(rest)))
    return min(tries, key=lambda trial: trial.before + trial.after)


class ExactSteps:
    """Steps with exact sums, as one worker measured them."""

    def __init__(self) -> None:
        self.steps: list[float] = []  # seconds from one to the next
        self.shown: list[float] = []  # of the exchange
        # for each step: buckets, and how many seconds before they were needed they left
        self.ready: list[list[tuple[int, float]]] = []
        self._shown = 0.0
        self._ready: list[tuple[int, float]] = []
        self._began: float | None = None

    def exchanged(self, shown: float, ready: Sequence[tuple[int, float]]) -> None:
        """Note that a backward has waited for its buckets."""
        self._shown += shown
        self._ready += ready

    def over(self) -> bool:
        """End a step, and return whether enough have been measured.

        Steps that sent nothing don't count.
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
        """Seconds of a step."""
        return statistics.median(self.steps[SKIPPED:])


def predict(record: ExactSteps, trial: CodecTrial, sizes: Sequence[int], rate: ExactRate) -> float:
    """Predict the seconds of a step with a codec.

    Coding takes the processor from the model, so none of it is taken to be hidden.
    """
    found = []
    for shown, ready in zip(record.shown[SKIPPED:], record.ready[SKIPPED:], strict=True):
        costs = [trial.cost(sizes[index], rate) for index, _ in ready]
        coding = sum(cost.before + cost.after for cost in costs)
        later = exposed([-before for _, before in ready], costs, 0.0)
        found.append(max(later, coding) - shown)
    return record.step + statistics.median(found)
