"""Prices all candidates of a script on a cluster, and finds what would change the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, get_args

from paceline.plan.candidates import Candidate, Kind, list_candidates
from paceline.plan.model_profile import MeasuredCondition, ModelProfile, StepTimes
from paceline.plan.planned_cluster import PlannedCluster, PlannedHost
from paceline.plan.step_cost import (
    SimulatedStep,
    WorkerLoad,
    choose_exchange,
    lay_out_buckets,
    simulate_step,
)

# Part of a prediction that is uncertain even if the script's steps are all alike: the median error
# of predictions in this project's lab.
MODEL_ERROR: Final = 0.08
MOST_PROCESSES: Final = 8  # processes that are measured at once
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
    cluster = candidate.cluster
    conditions, speeds = _find_measured(profile, cluster)
    shares = _deal_shares(profile, conditions, speeds, by_speed=candidate.by_speed)
    times = [
        _scale_times(condition.predict_step(profile.global_batch * share), speed)
        for condition, speed, share in zip(conditions, speeds, shares, strict=True)
    ]
    workers = [
        WorkerLoad(own, condition.copied_bytes_per_second * min(speed, 1.0))
        for own, condition, speed in zip(times, conditions, speeds, strict=True)
    ]
    route = choose_exchange(cluster, candidate.codec)
    gradients = lay_out_buckets(profile.gradients)
    step = simulate_step(
        cluster, workers, gradients, route, every=candidate.every, sharded=candidate.zero > 0
    )
    if cluster.workers > 1:
        step = _correct_step(step, correction)
    spread = max(each.spread for each in times)
    # One worker has no exchange that could be predicted wrongly.
    error = MODEL_ERROR if cluster.workers > 1 else 0.0
    return PricedCandidate(
        candidate,
        step,
        profile.global_batch / step.seconds,
        (error**2 + (spread / 2) ** 2) ** 0.5,
        _predict_states(profile, candidate),
        max(each.activation_bytes for each in times),
        tuple(shares),
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


def _thin_out(counts: Sequence[int]) -> tuple[float, ...]:
    """Keep the first, the last and the middle one."""
    return tuple(
        float(count) for count in dict.fromkeys((counts[0], counts[len(counts) // 2], counts[-1]))
    )


def imitate_host(cluster: PlannedCluster, index: int, cores: int) -> tuple[int, int]:
    """Choose the processes and threads that load this machine as much as that host's is loaded."""
    threads = min(cluster.hosts[index].threads, cores)
    return max(
        1, min(MOST_PROCESSES, round(cluster.machine_load(index) * cores / threads))
    ), threads


def _find_measured(
    profile: ModelProfile, cluster: PlannedCluster
) -> tuple[list[MeasuredCondition], list[float]]:
    """Find the measured condition of each worker, and how much faster than there it computes."""
    conditions, speeds = [], []
    for index, host in enumerate(cluster.hosts):
        condition = profile.find_condition(*imitate_host(cluster, index, profile.cores))
        # How many threads want each core: there, and here.
        there = max(1.0, cluster.machine_load(index))
        here = max(1.0, condition.processes * condition.threads / profile.cores)
        for cores in _count_own_cores(host, profile):
            conditions.append(condition)
            speeds.append(cores / condition.threads * here / there)
    return conditions, speeds


def _count_own_cores(host: PlannedHost, profile: ModelProfile) -> list[float]:
    """Count the cores of this machine that would compute as much as each worker of a host.

    Without measured products each core there is as fast as here. So it is on this machine itself.
    """
    if not host.flops or host.machine == profile.machine or not profile.core_flops:
        return [host.demand / host.workers] * host.workers
    # The products were measured while the workers of the host shared its cores.
    sharing = max(1.0, host.demand / host.cores)
    return [flops * sharing / profile.core_flops for flops in host.flops]


def _scale_times(times: StepTimes, speed: float) -> StepTimes:
    names = ("data", "forward", "backward", "optimizer", "other")
    return replace(times, **{name: getattr(times, name) / speed for name in names})


def _deal_shares(
    profile: ModelProfile,
    conditions: Sequence[MeasuredCondition],
    speeds: Sequence[float],
    *,
    by_speed: bool,
) -> list[float]:
    """Deal the global batch: equally, or so that all workers take about as long."""
    count = len(conditions)
    shares = [1.0 / count] * count
    for _ in range(8 if by_speed else 0):
        seconds = [
            max(_scale_times(c.predict_step(profile.global_batch * s), v).seconds, 1e-9)
            for c, v, s in zip(conditions, speeds, shares, strict=True)
        ]
        rates = [share / second for share, second in zip(shares, seconds, strict=True)]
        shares = [rate / sum(rates) for rate in rates]
    return shares


def _correct_step(step: SimulatedStep, correction: float) -> SimulatedStep:
    """Multiply all seconds of a step by a factor."""
    parts = {name: seconds * correction for name, seconds in step.parts.items()}
    return replace(step, seconds=step.seconds * correction, parts=parts)


def _predict_states(profile: ModelProfile, candidate: Candidate) -> float:
    """Predict the bytes that a worker holds from step to step."""
    parameters, gradients, optimizer = map(float, profile.state_bytes)
    count = candidate.cluster.workers
    if candidate.zero:
        optimizer /= count
        # What is sent lies in buckets in either case.
        gradients /= count if candidate.zero > 1 else 1
    # Several workers have buckets. With local SGD they keep the replica of the last round as well.
    buckets = 0 if count == 1 else 1 if candidate.every == 1 else 2
    states = parameters + gradients + optimizer + buckets * profile.trained_bytes
    return profile.base_bytes + profile.passing_bytes + states


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
    lossy: bool,
    describe_link: Callable[[float], str],
) -> list[PlanTurning]:
    """Find the nearest link speed, slower and faster, at which another way wins."""
    turnings: list[PlanTurning] = []
    if len(cluster.hosts) < 2:
        return turnings
    rate = min(min(host.up.bytes_per_second, host.down.bytes_per_second) for host in cluster.hosts)

    def find_best(factor: float) -> PricedCandidate:
        changed = cluster.scale_links(factor)
        return choose_best(price_candidates(profile, list_candidates(changed, lossy=lossy)))

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
        return candidate.kind, candidate.host_indices, workers, candidate.sync, candidate.cut

    return key(one) != key(other)


def choose_best(priced: Sequence[PricedCandidate]) -> PricedCandidate:
    """Choose the simplest of the ways that are about as fast as the fastest.

    Simple means: whole models before cut ones, exact before lossy, equal shares, fewer workers.
    """
    fastest = priced[0].step.seconds

    def complexity(each: PricedCandidate) -> tuple[int, bool, int, float]:
        candidate = each.candidate
        kind = KINDS.index(candidate.kind)
        return kind, candidate.by_speed, candidate.cluster.workers, each.step.seconds

    return min((each for each in priced if each.step.seconds <= TIE * fastest), key=complexity)


def choose_best_of_kinds(priced: Sequence[PricedCandidate]) -> list[PricedCandidate]:
    """Choose the fastest of each kind, in the order of their speed."""
    best: dict[str, PricedCandidate] = {}
    for each in priced:
        best.setdefault(each.candidate.kind, each)
    return sorted(best.values(), key=lambda each: each.step.seconds)
