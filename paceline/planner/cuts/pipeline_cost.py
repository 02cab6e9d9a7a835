"""Prices pipelines of a script's own layers: the schedule that would run, on measured layers.

    stage 0   F0 F1 F2 F3 .  .  B0 B1 B2 B3 |             | optimizer      replica 0
    stage 1   .  F0 B0 F1 B1 F2 B2 F3 B3    | sum         | optimizer
                                            | gradients   |
    stage 0   ...                           | of replicas |                replica 1

Replicas exchange gradients when a stage has done all micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from paceline.cluster.mesh import Mesh, lay_out_mesh
from paceline.cluster.topology import HostRanks, Topology
from paceline.comm.schedule import LinkSpeed
from paceline.parallel.pipelining.schedule import PipelineSchedule
from paceline.parallel.pipelining.schedules import FIXED_SCHEDULES, make_schedule
from paceline.parallel.pipelining.simulate import PipelineTimeline, StageTimes, simulate_schedule
from paceline.parallel.pipelining.split import (
    LayerCost,
    SplitProblem,
    make_even_split,
    minimise_slowest_stage,
)
from paceline.planner import exchange_cost
from paceline.planner.candidates import Candidate
from paceline.planner.cuts.layer_profile import predict_layers, recompute_layers, sum_seconds
from paceline.planner.cuts.way_cost import WayCost
from paceline.planner.model_profile import MeasuredCondition, ModelProfile
from paceline.planner.planned_cluster import PlannedCluster
from paceline.planner.step_cost import (
    BUCKET,
    BucketLoad,
    Event,
    GradientLoad,
    SimulatedStep,
    choose_exchange,
    simulate_bare_exchange,
)
from paceline.planner.worker_speeds import find_measured, scale_times


@dataclass(frozen=True)
class _Places:
    """The places of a pipeline, the same in all replicas: the slowest of each decides.

    Attributes:
        mesh: All workers.
        hosts: Host of each rank.
        speeds: How much faster each place is than the worker whose layers are priced.
        copy_rates: Bytes that each rank reads and writes a second.
    """

    mesh: Mesh
    hosts: tuple[int, ...]
    speeds: tuple[float, ...]
    copy_rates: tuple[float, ...]

    def ranks_of(self, place: int) -> list[int]:
        """List the ranks that have this place, one in each replica."""
        return [
            rank for rank in self.mesh.grid if self.mesh.coordinates(rank).get("stage", 0) == place
        ]


@dataclass(frozen=True)
class _Pipeline:
    """A pipeline that is being priced: the layers of each stage, where they are, and how fast."""

    profile: ModelProfile
    candidate: Candidate
    places: _Places
    condition: MeasuredCondition
    problem: SplitProblem
    counts: tuple[int, ...]

    @property
    def parts(self) -> list[Sequence[LayerCost]]:
        """Layers of each stage."""
        bounds = pairwise([0, *accumulate(self.counts)])
        return [self.problem.costs[start:stop] for start, stop in bounds]

    def sum_places(self, stage_values: Sequence[float]) -> list[float]:
        """Sum up a value of each stage for each place."""
        sums = [0.0] * self.candidate.stages
        for place, value in zip(self.problem.schedule.placed, stage_values, strict=True):
            sums[place] += value
        return sums


def price_pipeline(profile: ModelProfile, candidate: Candidate) -> WayCost:
    """Price a pipeline, with the split whose slowest stage is fastest."""
    cluster = candidate.cluster
    conditions, speeds = find_measured(profile, cluster)
    samples = profile.global_batch / candidate.replicas / candidate.micro_batches
    schedule = _make_schedule(
        candidate.schedule, candidate.stages, candidate.micro_batches, candidate.chunks
    )
    places = _lay_out_places(candidate, conditions, speeds, samples)
    costs = predict_layers(conditions[0].layers, samples)
    if candidate.recompute:
        costs = recompute_layers(costs, profile.checkpointed.names)
    counts = _choose_split(costs, schedule, places.speeds)
    pipeline = _Pipeline(
        profile,
        candidate,
        places,
        conditions[0],
        SplitProblem(costs, schedule, places.speeds),
        counts,
    )
    times = replace(_time_stages(pipeline), links=_find_links(cluster, places, schedule))
    timeline = simulate_schedule(schedule, times, places.speeds)
    state, activations = _predict_memory(pipeline, timeline)
    return WayCost(
        replace(candidate, split=counts),
        _finish_step(pipeline, timeline),
        state,
        activations,
        (1 / candidate.replicas,) * cluster.workers,
        max(each.spread for condition in conditions for each in condition.steps),
    )


@lru_cache(maxsize=256)
def _make_schedule(name: str, ranks: int, micro_batches: int, chunks: int) -> PipelineSchedule:
    # Schedules with a fixed number of stages know it themselves.
    return make_schedule(name, ranks, micro_batches, None if name in FIXED_SCHEDULES else chunks)


@lru_cache(maxsize=1024)
def _choose_split(
    costs: tuple[LayerCost, ...], schedule: PipelineSchedule, speeds: tuple[float, ...]
) -> tuple[int, ...]:
    """Choose the split whose slowest stage is fastest."""
    counts = minimise_slowest_stage(SplitProblem(costs, schedule, speeds))
    return tuple(counts or make_even_split(len(costs), schedule.stages))


def _lay_out_places(
    candidate: Candidate,
    conditions: Sequence[MeasuredCondition],
    speeds: Sequence[float],
    samples: float,
) -> _Places:
    """Lay out the workers as a run would, and find how fast each place is."""
    cluster = candidate.cluster
    first, hosts = 0, []
    for host in cluster.hosts:
        hosts.append(HostRanks(host.name, tuple(range(first, first + host.workers)), ""))
        first += host.workers
    sizes: dict[str, int | None] = {"data": candidate.replicas, "stage": candidate.stages}
    mesh = lay_out_mesh(sizes, Topology(tuple(hosts)))
    # Seconds of all layers on each worker, compared with the first worker's measurement.
    base = sum_seconds(predict_layers(conditions[0].layers, samples))
    ranks = [
        speed * base / sum_seconds(predict_layers(condition.layers, samples))
        for condition, speed in zip(conditions, speeds, strict=True)
    ]
    rates = [
        condition.copied_bytes_per_second * min(speed, 1.0)
        for condition, speed in zip(conditions, speeds, strict=True)
    ]
    places = _Places(mesh, cluster.host_of_workers(), (), tuple(rates))
    slowest = [
        min(ranks[rank] for rank in places.ranks_of(place)) for place in range(candidate.stages)
    ]
    return replace(places, speeds=tuple(slowest))


def _find_links(
    cluster: PlannedCluster, places: _Places, schedule: PipelineSchedule
) -> list[LinkSpeed]:
    """Find the slowest link, over all replicas, between each stage and the next."""
    links = []
    for one, other in pairwise(schedule.placed):
        pairs = zip(places.ranks_of(one), places.ranks_of(other), strict=True)
        ways = [exchange_cost.STAGE_LINK]
        for source, target in pairs:
            hosts = cluster.hosts[places.hosts[source]], cluster.hosts[places.hosts[target]]
            if hosts[0] is not hosts[1]:
                ways += [hosts[0].up, hosts[0].down, hosts[1].up, hosts[1].down]
        links.append(
            LinkSpeed(
                max(way.latency_seconds for way in ways), min(way.bytes_per_second for way in ways)
            )
        )
    return links


def _time_stages(pipeline: _Pipeline) -> StageTimes:
    """Time the stages: layers, what an action takes besides, and sums of gradients."""
    problem, rate = pipeline.problem, pipeline.condition.copied_bytes_per_second
    times = problem.stage_times(pipeline.counts)
    sums = [
        exchange_cost.ACCUMULATE_TRAFFIC * sum(cost.trained for cost in part) / rate
        for part in pipeline.parts
    ]
    fixed = exchange_cost.ACTION_SECONDS
    forwards = [seconds + fixed for seconds in times.forwards]
    backwards = [seconds + fixed + own for seconds, own in zip(times.backwards, sums, strict=True)]
    if problem.schedule.name not in exchange_cost.SPLIT_SCHEDULES:
        return replace(times, forwards=forwards, backwards=backwards)
    # Two halves of a backward go through the graph twice.
    half = [seconds / 2 + fixed / 2 for seconds in times.backwards]
    return replace(
        times,
        forwards=forwards,
        backwards=backwards,
        input_backwards=half,
        weight_backwards=[one + own for one, own in zip(half, sums, strict=True)],
    )


def _finish_step(pipeline: _Pipeline, timeline: PipelineTimeline) -> SimulatedStep:
    """Add everything besides the schedule: data, the exchange of replicas, and optimizers."""
    profile, candidate, places = pipeline.profile, pipeline.candidate, pipeline.places
    trained = pipeline.sum_places([sum(cost.trained for cost in part) for part in pipeline.parts])
    whole = scale_times(
        pipeline.condition.predict_step(profile.global_batch / candidate.replicas),
        min(places.speeds),
    )
    optimizer = whole.optimizer * max(trained) / max(profile.trained_bytes, 1)
    exchange, within, between = _exchange_replicas(candidate, places, trained)
    inside, across = _count_messages(pipeline, timeline)
    forward = max(
        sum(span.end - span.start for span in row if span.action.kind == "forward")
        for row in timeline.rows
    )
    busiest = timeline.makespan - min(timeline.idle)
    fixed = exchange_cost.STEP_SECONDS + exchange
    parts_by_name = {
        "data": whole.data,
        "forward": min(forward, busiest),
        "backward": busiest - min(forward, busiest),
        "exchange": min(timeline.idle) + fixed,
        "optimizer": optimizer,
        "other": whole.other,
    }
    begin = whole.data
    events = [
        Event(f"worker {rank}", str(span.action), begin + span.start, begin + span.end)
        for rank, row in enumerate(timeline.rows)
        for span in row
    ]
    return SimulatedStep(
        sum(parts_by_name.values()),
        parts_by_name,
        within + inside,
        between + across,
        tuple(events),
    )


def _count_messages(pipeline: _Pipeline, timeline: PipelineTimeline) -> tuple[float, float]:
    """Count the bytes that stages of all replicas send inside hosts, and between them."""
    places, inside, across = pipeline.places, 0.0, 0.0
    ranks = [places.ranks_of(place) for place in range(pipeline.candidate.stages)]
    for transfer in timeline.transfers:
        pairs = zip(ranks[transfer.source], ranks[transfer.target], strict=True)
        crossing = sum(places.hosts[one] != places.hosts[other] for one, other in pairs)
        across += crossing * transfer.nbytes
        inside += (pipeline.candidate.replicas - crossing) * transfer.nbytes
    return inside, across


def _exchange_replicas(
    candidate: Candidate, places: _Places, trained: Sequence[float]
) -> tuple[float, float, float]:
    """Predict the exchange of the gradients of all replicas.

    Returns:
        Seconds, bytes sent inside hosts, and bytes sent between them, of all workers.
    """
    if candidate.replicas == 1:
        return 0.0, 0.0, 0.0
    slowest, within, between = 0.0, 0.0, 0.0
    for place, nbytes in enumerate(trained):
        ranks = places.ranks_of(place)
        hosts = [places.hosts[rank] for rank in ranks]
        used = sorted(set(hosts))
        # Each place is a worker of its own on these hosts. All places exchange at the same time.
        cluster = replace(
            candidate.cluster,
            hosts=tuple(
                replace(candidate.cluster.hosts[host], workers=hosts.count(host), flops=())
                for host in used
            ),
        ).scale_links(1 / candidate.stages)
        count = max(1, round(nbytes / BUCKET))
        buckets = tuple(BucketLoad(nbytes / count, 0.0) for _ in range(count))
        seconds, inside, across = simulate_bare_exchange(
            cluster,
            [places.copy_rates[rank] for rank in ranks],
            GradientLoad(0, buckets),
            choose_exchange(cluster),
        )
        slowest, within, between = max(slowest, seconds), within + inside, between + across
    return slowest, within, between


def _predict_memory(pipeline: _Pipeline, timeline: PipelineTimeline) -> tuple[float, float]:
    """Predict the bytes of the worker that needs the most: states, and activations."""
    profile, candidate = pipeline.profile, pipeline.candidate
    _, trained, optimizer = profile.state_bytes
    per_byte = 1.0 + (optimizer / trained if trained else 0.0)
    # With several replicas gradients lie in buckets as well.
    per_byte += 1.0 if candidate.replicas > 1 else 0.0
    states = pipeline.sum_places(
        [sum(cost.parameters + cost.trained * per_byte for cost in part) for part in pipeline.parts]
    )
    worst = max(
        range(candidate.stages), key=lambda place: states[place] + timeline.kept_bytes[place]
    )
    again = _find_recomputed_bytes(pipeline) if candidate.recompute else 0.0
    passing = profile.predict_passing_bytes(
        profile.global_batch / candidate.replicas / candidate.micro_batches
    )
    return (
        profile.base_bytes + passing + states[worst],
        timeline.kept_bytes[worst] + again,
    )


def _find_recomputed_bytes(pipeline: _Pipeline) -> float:
    """Find the bytes of the largest layer that is computed again, for one micro-batch."""
    profile, candidate = pipeline.profile, pipeline.candidate
    samples = profile.global_batch / candidate.replicas / candidate.micro_batches
    costs = predict_layers(pipeline.condition.layers, samples)
    return max(
        (float(cost.kept) for cost in costs if cost.name in profile.checkpointed.names),
        default=0.0,
    )
