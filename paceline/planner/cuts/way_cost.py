"""What a way to train costs, before it is corrected by earlier runs."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.planner.candidates import Candidate
from paceline.planner.step_cost import SimulatedStep


@dataclass(frozen=True)
class WayCost:
    """The cost of one way to train.

    Attributes:
        candidate: The way, with all that pricing has decided.
        step: The simulated step.
        state_bytes: Bytes that a worker needs whatever its share is.
        activation_bytes: Bytes that autograd keeps on the worker that keeps the most.
        shares: Part of the global batch of each worker.
        spread: Range of the middle half of measured steps, as a part of the median.
    """

    candidate: Candidate
    step: SimulatedStep
    state_bytes: float
    activation_bytes: float
    shares: tuple[float, ...]
    spread: float
