"""Prices all candidates of a script on a cluster, and finds what would change the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, get_args

from paceline.data.balance import SpeedCurve, balance_shares
from paceline.planner.candidates import Candidate, Kind
from paceline.planner.cuts.gathered_cost import price_gathered
from paceline.planner.cuts.pipeline_cost import price_pipeline
from paceline.planner.cuts.recompute import recompute_step
from paceline.planner.cuts.tensor_cost import price_tensor
from paceline.planner.cuts.way_cost import WayCost
from paceline.planner.model_profile import MeasuredCondition, ModelProfile
from paceline.planner.planned_cluster import PlannedCluster
from paceline.planner.step_cost import (
    SimulatedStep,
    WorkerLoad,
    choose_exchange,
    lay_out_buckets,
    simulate_step,
)
from paceline.planner.worker_speeds import find_measured, imitate_host, scale_times

# Part of a prediction that is uncertain even if the script's steps are all alike: the median error
# of predictions in this project's lab.
MODEL_ERROR: Final = 0.08
TIE: Final = 1.05  # seconds / seconds of the fastest, up to which two ways are about as fast
KINDS: Final = get_args(Kind)  # the simplest first
CLEAR_GAIN: Final = 0.95  # seconds of the best way / seconds of one worker, to say that it pays


@dataclass(frozen=True)
class PricedCandidate:
    """A candidate with its predicted step.

    Attributes:
        candidate: The way to train.
        step: The simulated step.
        samples_per_second: Of all workers together.
        uncertainty: Range of the prediction, as a part of it: 0.1 is from 0.9 to 1.1 times.
        state_bytes: Bytes that each worker needs whatever its share is: the process, states,
            buckets, and what a step needs for a short time.
        activation_bytes: Bytes that autograd keeps on the worker with the largest share.
        shares: Part of the global batch of each worker.
    """

    candidate: Candidate
    step: SimulatedStep
    samples_per_second: float
    uncertainty: float
    state_bytes: float
    activation_bytes: float
    shares: tuple[float, ...]

    @property
    def memory_bytes(self) -> float:
        """Bytes that the largest worker holds."""
        return self.state_bytes + self.activation_bytes


def price_candidates(
    profile: ModelProfile, candidates: Iterable[Candidate], correction: float = 1.0
) -> list[PricedCandidate]:
    """Price candidates, the fastest first.

    Args:
        profile: What was measured of the script.
        candidates: The ways to train.
        correction: Factor of the steps of several workers, learnt from runs on this cluster.
    """
    priced = [price_candidate(profile, candidate, correction) for candidate in candidates]
    return sorted(priced, key=lambda each: each.step.seconds)


def price_candidate(
    profile: ModelProfile, candidate: Candidate, correction: float = 1.0
) -> PricedCandidate:
    """Predict the step of one candidate."""
    several = candidate.cluster.workers > 1
    price = (
        price_pipeline
        if candidate.stages > 1
        else price_tensor
        if candidate.tensor > 1
        else price_gathered
        if candidate.zero == 3
        else _price_whole_model
    )
    cost = price(profile, candidate)
    # One worker has no exchange that could be predicted wrongly.
    error = MODEL_ERROR if several else 0.0
    step = _correct_step(cost.step, correction) if several else cost.step
    return PricedCandidate(
        cost.candidate,
        step,
        profile.global_batch / step.seconds,
        (error**2 + (cost.spread / 2) ** 2) ** 0.5,
        cost.state_bytes,
        cost.activation_bytes,
        cost.shares,
    )


def _price_whole_model(profile: ModelProfile, candidate: Candidate) -> WayCost:
    """Price a way in which each worker computes with the whole model."""
    cluster = candidate.cluster
    conditions, speeds = find_measured(profile, cluster)
    shares = _deal_shares(profile, conditions, speeds, by_speed=candidate.by_speed)
    samples = [profile.global_batch * share for share in shares]
    times = [
        scale_times(condition.predict_step(own), speed)
        for condition, speed, own in zip(conditions, speeds, samples, strict=True)
    ]
    if candidate.recompute:
        times = [
            recompute_step(profile, condition, own, count, speed)
            for own, condition, count, speed in zip(times, conditions, samples, speeds, strict=True)
        ]
    workers = [
        WorkerLoad(own, condition.copied_bytes_per_second * min(speed, 1.0))
        for own, condition, speed in zip(times, conditions, speeds, strict=True)
    ]
    route = choose_exchange(cluster, candidate.codec)
    step = simulate_step(
        cluster,
        workers,
        lay_out_buckets(profile.gradients),
        route,
        every=candidate.every,
        sharded=candidate.zero > 0,
    )
    return WayCost(
        candidate,
        step,
        _predict_states(profile, candidate, max(samples)),
        max(each.activation_bytes for each in times),
        tuple(shares),
        max(each.spread for each in times),
    )


def find_conditions(
    candidates: Iterable[Candidate], cores: int
) -> dict[tuple[int, int], tuple[float, ...]]:
    """Find what has to be measured on this machine, to price these candidates.

    Args:
        candidates: The ways to train.
        cores: Cores of this machine.

    Returns:
        Parts of the global batch, by processes that compute at once and their threads. A part of 2
        is half of the batch.
    """
    parts: dict[tuple[int, int], set[int]] = {}
    for candidate in candidates:
        for index in range(len(candidate.cluster.hosts)):
            condition = imitate_host(candidate.cluster, index, cores)
            parts.setdefault(condition, set()).add(candidate.cluster.workers)
    return {condition: _thin_out(sorted(counts)) for condition, counts in sorted(parts.items())}


def find_tensor_conditions(
    candidates: Iterable[Candidate], cores: int
) -> dict[tuple[int, int, int], tuple[float, ...]]:
    """Find what has to be measured of workers that divide layers.

    Args:
        candidates: The ways to train. Those that divide no layers don't count.
        cores: Cores of this machine.

    Returns:
        Parts of the global batch, by number of workers that divide layers, processes that compute
        at once, and their threads.
    """
    parts: dict[tuple[int, int, int], set[int]] = {}
    for candidate in candidates:
        size = candidate.tensor
        for index in range(len(candidate.cluster.hosts) if size > 1 else 0):
            processes, threads = imitate_host(candidate.cluster, index, cores)
            # Whole groups of workers, one at least.
            condition = size, size * -(-processes // size), threads
            parts.setdefault(condition, set()).add(candidate.cluster.workers // size)
    return {condition: _thin_out(sorted(counts)) for condition, counts in sorted(parts.items())}


def _thin_out(counts: Sequence[int]) -> tuple[float, ...]:
    """Keep the first, the last and the middle one."""
    return tuple(
        float(count) for count in dict.fromkeys((counts[0], counts[len(counts) // 2], counts[-1]))
    )


def _deal_shares(
    profile: ModelProfile,
    conditions: Sequence[MeasuredCondition],
    speeds: Sequence[float],
    *,
    by_speed: bool,
) -> list[float]:
    """Deal the global batch: equally, or by speed, as a run with `shares="auto"` does."""
    count, batch = len(conditions), profile.global_batch
    if not by_speed:
        return [1.0 / count] * count
    curves = [
        _fit_curve(condition, speed, batch)
        for condition, speed in zip(conditions, speeds, strict=True)
    ]
    return [share / batch for share in balance_shares(batch, curves)]


def _fit_curve(condition: MeasuredCondition, speed: float, batch: int) -> SpeedCurve:
    """Fit the line through the seconds of a step with the whole batch, and with half of it."""
    half, whole = (
        scale_times(condition.predict_step(samples), speed).seconds
        for samples in (batch / 2, batch)
    )
    per_sample = max(min((whole - half) / (batch / 2), whole / batch), 1e-12)
    return SpeedCurve(max(whole - per_sample * batch, 0.0), per_sample)


def _correct_step(step: SimulatedStep, correction: float) -> SimulatedStep:
    """Multiply all seconds of a step by a factor."""
    parts = {name: seconds * correction for name, seconds in step.parts.items()}
    return replace(step, seconds=step.seconds * correction, parts=parts)


def _predict_states(profile: ModelProfile, candidate: Candidate, samples: float) -> float:
    """Predict the bytes that a worker with so many samples holds besides activations."""
    parameters, gradients, optimizer = map(float, profile.state_bytes)
    count = candidate.cluster.workers
    if candidate.zero:
        optimizer /= count
        # What is sent lies in buckets in either case.
        gradients /= count if candidate.zero > 1 else 1
    # Several workers have buckets. With local SGD they keep the replica of the last round as well.
    buckets = 0 if count == 1 else 1 if candidate.every == 1 else 2
    states = parameters + gradients + optimizer + buckets * profile.trained_bytes
    return profile.base_bytes + profile.predict_passing_bytes(samples) + states


@dataclass(frozen=True)
class PlanTurning:
    """A change of the cluster or of the batch with which another way is the fastest.

    Attributes:
        what: What changes, in words.
        best: The way that is the fastest then.
    """

    what: str
    best: PricedCandidate


def find_turnings(
    profile: ModelProfile,
    cluster: PlannedCluster,
    best: PricedCandidate,
    *,
    list_ways: Callable[[PlannedCluster], Iterable[Candidate]],
    describe_link: Callable[[float], str],
) -> list[PlanTurning]:
    """Find the nearest link speed, slower and faster, at which another way wins.

    Args:
        profile: What was measured of the script.
        cluster: The cluster.
        best: The way that wins there.
        list_ways: Lists the ways to train on a cluster.
        describe_link: Describes a link of some bytes per second.
    """
    turnings: list[PlanTurning] = []
    if len(cluster.hosts) < 2:
        return turnings
    rate = min(min(host.up.bytes_per_second, host.down.bytes_per_second) for host in cluster.hosts)

    def find_best(factor: float) -> PricedCandidate:
        changed = cluster.scale_links(factor)
        return choose_best(price_candidates(profile, list_ways(changed)))

    for factors in ([2**-power for power in range(1, 11)], [2**power for power in range(1, 11)]):
        for factor in factors:
            other = find_best(factor)
            if is_another_way(other, best):
                what = f"a link of {describe_link(rate * factor)} between hosts"
                turnings.append(PlanTurning(what, other))
                break
    return turnings


def is_another_way(one: PricedCandidate, other: PricedCandidate) -> bool:
    """Whether two candidates differ in their workers or their strategy."""

    def key(priced: PricedCandidate) -> tuple[object, ...]:
        candidate = priced.candidate
        workers = tuple(host.workers for host in candidate.cluster.hosts)
        cuts = candidate.zero, candidate.mesh
        return candidate.kind, candidate.host_indices, workers, candidate.sync, cuts

    return key(one) != key(other)


def choose_best(priced: Sequence[PricedCandidate]) -> PricedCandidate:
    """Choose the simplest of the ways that are about as fast as the fastest.

    Simple means: whole models before cut ones, exact before lossy, equal shares, fewer workers.
    Activation checkpoints are the script's own, so no plan can choose them.
    """
    possible = [each for each in priced if not each.candidate.recompute]
    fastest = possible[0].step.seconds

    def complexity(each: PricedCandidate) -> tuple[int, bool, int, float]:
        candidate = each.candidate
        kind = KINDS.index(candidate.kind)
        return kind, candidate.by_speed, candidate.cluster.workers, each.step.seconds

    return min((each for each in possible if each.step.seconds <= TIE * fastest), key=complexity)


def choose_best_of_kinds(priced: Sequence[PricedCandidate]) -> list[PricedCandidate]:
    """Choose the fastest of each kind, in the order of their speed."""
    best: dict[str, PricedCandidate] = {}
    for each in priced:
        best.setdefault(each.candidate.kind, each)
    return sorted(best.values(), key=lambda each: each.step.seconds)
