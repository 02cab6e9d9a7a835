"""Prices `shard(zero=3)`: units of the model are gathered before they run, and sums are cut.

    compute   |f0 |f1 |f2 |b2   |b1   |b0   |
    exchange  g0 g1  g2   g1    s2 g0   s1    s0       g: gather a unit   s: sum its gradients
                                                       of which each worker keeps its part

While a unit runs, the next one is gathered. On a host without an idle core an exchange delays the
workers that compute, except while it waits for a link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import zip_longest
from typing import NamedTuple

from paceline.errors import UsageError
from paceline.planner import exchange_cost
from paceline.planner.candidates import Candidate
from paceline.planner.cuts.layer_profile import predict_layers, shorten_names
from paceline.planner.cuts.way_cost import WayCost
from paceline.planner.model_profile import MeasuredCondition, ModelProfile, StepTimes
from paceline.planner.planned_cluster import PlannedCluster
from paceline.planner.step_cost import (
    BucketLoad,
    Event,
    ExchangePrice,
    ExchangeRoute,
    GradientLoad,
    SimulatedStep,
    choose_exchange,
    has_idle_core,
    price_gather,
    simulate_bare_exchange,
)
from paceline.planner.worker_speeds import find_measured, scale_times

WHOLE_UNITS = 2  # units that are whole at the same time: the one that runs, and the next one


class _Unit(NamedTuple):
    """A unit: seconds of its forward and backward, bytes of its parameters and gradients."""

    name: str
    forward: float
    backward: float
    parameters: float
    trained: float


@dataclass(frozen=True)
class _Exchanges:
    """Exchanges of a cluster."""

    cluster: PlannedCluster
    copy_rates: Sequence[float]
    route: ExchangeRoute

    def gather(self, nbytes: float) -> ExchangePrice:
        """Price the gathering of a unit."""
        return price_gather(self.cluster, self.copy_rates, nbytes, self.route)

    def sum_parts(self, nbytes: float) -> ExchangePrice:
        """Price the sum of a unit's gradients, of which each worker gets its part."""
        load = GradientLoad(1, (BucketLoad(nbytes, 0.0),))
        return simulate_bare_exchange(self.cluster, self.copy_rates, load, self.route, sharded=True)

    def delay(self, cost: ExchangePrice, nbytes: float) -> float:
        """Seconds for which an exchange delays the workers that compute."""
        if all(has_idle_core(self.cluster, host) for host in range(len(self.cluster.hosts))):
            return 0.0
        return max(0.0, cost.seconds - self.route.link_seconds(nbytes) / 2)


def price_gathered(profile: ModelProfile, candidate: Candidate) -> WayCost:
    """Price a way in which workers have parts of all parameters."""
    cluster = candidate.cluster
    conditions, speeds = find_measured(profile, cluster)
    samples = profile.global_batch / cluster.workers
    workers = [
        (scale_times(condition.predict_step(samples), speed), condition)
        for condition, speed in zip(conditions, speeds, strict=True)
    ]
    # Workers meet at each unit, so the slowest decides.
    times, condition = max(workers, key=lambda worker: worker[0].seconds)
    units, root = _group_units(profile, candidate.units, times, condition)
    rates = [
        each.copied_bytes_per_second * min(speed, 1.0)
        for each, speed in zip(conditions, speeds, strict=True)
    ]
    clock = _GatheredClock(_Exchanges(cluster, rates, choose_exchange(cluster)), times)
    clock.run_step(units, root)
    return WayCost(
        candidate,
        clock.finish(cluster.workers),
        _predict_states(profile, candidate, units, root),
        times.activation_bytes,
        (1 / cluster.workers,) * cluster.workers,
        max(own.spread for own, _ in workers),
    )


def _group_units(
    profile: ModelProfile, patterns: Sequence[str], times: StepTimes, condition: MeasuredCondition
) -> tuple[list[_Unit], _Unit]:
    """Divide a step between its units and the root, which has all other layers."""
    # Without patterns the root is the whole model. The layers of some models can't be measured.
    measured = condition.layers if patterns else ()
    layers = predict_layers(measured, times.samples) if measured else ()
    for pattern in patterns:
        if not any(fnmatchcase(layer.name, pattern) for layer in layers):
            known = ", ".join(shorten_names([layer.name for layer in layers])) or "none"
            raise UsageError(
                f"shard({pattern!r}, zero=3) can't be priced: no measured layer has such a name; "
                f"there are: {known}"
            )
    # Layers are measured by themselves. Their shares of the step are right, not their sums.
    forward = times.forward / (sum(layer.forward_seconds for layer in layers) or 1.0)
    backward = times.backward / (sum(layer.backward_seconds for layer in layers) or 1.0)
    units = [
        _Unit(
            layer.name,
            layer.forward_seconds * forward,
            layer.backward_seconds * backward,
            layer.parameters,
            layer.trained,
        )
        for layer in layers
        if any(fnmatchcase(layer.name, pattern) for pattern in patterns)
    ]
    rest = _Unit(
        "",
        times.forward - sum(unit.forward for unit in units),
        times.backward - sum(unit.backward for unit in units),
        max(0.0, profile.state_bytes[0] - sum(unit.parameters for unit in units)),
        max(0.0, profile.trained_bytes - sum(unit.trained for unit in units)),
    )
    return units, rest


class _GatheredClock:
    """The virtual clock of a step.

    Attributes:
        now: When the workers have computed what came so far.
        free: When the exchanges so far have ended. They run one after the other.
    """

    def __init__(self, exchanges: _Exchanges, times: StepTimes) -> None:
        self._exchanges, self._times = exchanges, times
        self.now = self.free = times.data
        self._within = self._between = 0.0
        self._events: list[Event] = []

    def run_step(self, units: Sequence[_Unit], root: _Unit) -> None:
        """Run forward and backward. The root is whole from the begin to the end."""
        self._exchange("gather the rest", root.parameters)
        self.now = max(self.now, self.free) + root.forward
        self._run_units("forward", units)
        self.now += root.backward
        self._run_units("backward", units[::-1])
        self._exchange("sum the rest", root.trained, summed=True)

    def _run_units(self, part: str, units: Sequence[_Unit]) -> None:
        """Run one unit after the other, and gather the next one meanwhile."""
        # No unit before it has gathered the first one.
        for unit in units[:1]:
            self._exchange(f"gather {unit.name}", unit.parameters)
        for unit, following in zip_longest(units, units[1:]):
            self.now = max(self.now, self.free)
            start, seconds = self.now, unit.forward if part == "forward" else unit.backward
            if following is not None:
                self._exchange(f"gather {following.name}", following.parameters)
            self.now += seconds
            self._events.append(Event("workers", f"{part} {unit.name}", start, self.now))
            if part == "backward":
                self._exchange(f"sum {unit.name}", unit.trained, summed=True)

    def _exchange(self, name: str, nbytes: float, *, summed: bool = False) -> None:
        """Begin an exchange now, after those before it."""
        if not nbytes:
            return
        cost = self._exchanges.sum_parts(nbytes) if summed else self._exchanges.gather(nbytes)
        start = max(self.now, self.free)
        self.free = start + cost.seconds
        self.now += self._exchanges.delay(cost, nbytes)
        self._within += cost.within_bytes
        self._between += cost.between_bytes
        self._events.append(Event("exchange", name, start, self.free))

    def finish(self, workers: int) -> SimulatedStep:
        """End the step: each worker steps its part of the parameters."""
        times = self._times
        optimizer = times.optimizer / workers
        end = max(self.now, self.free) + exchange_cost.STEP_SECONDS + exchange_cost.SHARD_SECONDS
        computed = times.data + times.forward + times.backward
        parts = {
            "data": times.data,
            "forward": times.forward,
            "backward": times.backward,
            "exchange": end - computed,
            "optimizer": optimizer,
            "other": times.other,
        }
        self._events.append(Event("workers", "optimizer", end, end + optimizer))
        return SimulatedStep(
            end + optimizer + times.other, parts, self._within, self._between, tuple(self._events)
        )


def _predict_states(
    profile: ModelProfile, candidate: Candidate, units: Sequence[_Unit], root: _Unit
) -> float:
    """Predict the bytes that a worker holds besides activations."""
    count = candidate.cluster.workers
    passing = profile.predict_passing_bytes(profile.global_batch / count)
    largest = WHOLE_UNITS * max((unit.parameters for unit in units), default=0.0)
    # The gradients of a unit are summed while the next unit makes its own.
    buckets = WHOLE_UNITS * max((unit.trained for unit in units), default=0.0)
    whole, buckets = root.parameters + largest, max(root.trained, buckets)
    return profile.base_bytes + passing + sum(profile.state_bytes) / count + whole + buckets
