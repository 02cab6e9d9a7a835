"""Prices ways in which workers of a host divide each layer between them, by measured steps.

    host   | worker 0 | worker 1 |   worker 2 | worker 3 |       two groups of two
             one replica             another one

A group computes as it did when it was measured, exchanges included. Between groups it is data
parallelism: a group is simulated as one worker, with a part of the gradients.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.planner.candidates import Candidate
from paceline.planner.cuts.recompute import share_of_checkpoints
from paceline.planner.cuts.way_cost import WayCost
from paceline.planner.model_profile import ModelProfile, StepTimes, find_tensor_worker
from paceline.planner.planned_cluster import PlannedCluster
from paceline.planner.step_cost import (
    SimulatedStep,
    WorkerLoad,
    choose_exchange,
    lay_out_buckets,
    simulate_step,
)
from paceline.planner.worker_speeds import find_measured, scale_times


def price_tensor(profile: ModelProfile, candidate: Candidate) -> WayCost:
    """Price a way in which `candidate.tensor` workers divide each layer."""
    size, cluster = candidate.tensor, candidate.cluster
    worker = find_tensor_worker(profile, size).profile
    conditions, speeds = find_measured(worker, cluster)
    samples = profile.global_batch / candidate.replicas
    times = [
        scale_times(condition.predict_step(samples), speed)
        for condition, speed in zip(conditions, speeds, strict=True)
    ]
    if candidate.recompute:
        times = [_recompute_part(profile, each, samples) for each in times]
    loads = [
        WorkerLoad(own, condition.copied_bytes_per_second * min(speed, 1.0))
        for own, condition, speed in zip(times, conditions, speeds, strict=True)
    ]
    # The slowest worker of a group decides. Workers of a host are neighbours.
    groups = [
        max(loads[start : start + size], key=lambda load: load.times.seconds)
        for start in range(0, len(loads), size)
    ]
    merged = merge_groups(cluster, size)
    # All workers of a group cross the link at the same time, each with its part.
    route = choose_exchange(merged.scale_links(1 / size), candidate.codec)
    step = simulate_step(merged, groups, lay_out_buckets(worker.gradients), route)
    return WayCost(
        candidate,
        _add_group_bytes(step, candidate, times),
        _predict_states(worker, candidate),
        max(each.activation_bytes for each in times),
        (1 / candidate.replicas,) * cluster.workers,
        max(each.spread for each in times),
    )


def merge_groups(cluster: PlannedCluster, size: int) -> PlannedCluster:
    """Make each `size` workers of a host one worker that has the threads of all."""
    hosts = tuple(
        replace(host, workers=host.workers // size, threads=host.threads * size, flops=())
        for host in cluster.hosts
    )
    return replace(cluster, hosts=hosts)


def _add_group_bytes(
    step: SimulatedStep, candidate: Candidate, times: list[StepTimes]
) -> SimulatedStep:
    """Count the bytes of all workers: each sends inside its group, and a part between groups."""
    inside = sum(each.exchanged_bytes for each in times)
    return replace(
        step,
        within_bytes=step.within_bytes * candidate.tensor + inside,
        between_bytes=step.between_bytes * candidate.tensor,
    )


def _predict_states(worker: ModelProfile, candidate: Candidate) -> float:
    """Predict the bytes that a worker holds besides activations."""
    passing = worker.predict_passing_bytes(worker.global_batch / candidate.replicas)
    buckets = worker.trained_bytes if candidate.replicas > 1 else 0
    return worker.base_bytes + passing + sum(worker.state_bytes) + buckets


def _recompute_part(profile: ModelProfile, times: StepTimes, samples: float) -> StepTimes:
    """Change the step of a worker with parts of layers into one with activation checkpoints.

    What checkpoints save is divided as all activations are, by what was measured.
    """
    whole = profile.conditions[0]
    again = share_of_checkpoints(profile, whole)
    saved = profile.checkpointed.saved_bytes * samples / profile.global_batch
    kept = whole.predict_step(samples).activation_bytes
    divided = times.activation_bytes / kept if kept else 1.0
    largest: float = max(
        cost.kept for cost in whole.layers[-1].costs if cost.name in profile.checkpointed.names
    )
    largest = largest * samples / whole.layers[-1].samples
    return replace(
        times,
        backward=times.backward + again * times.forward,
        exchange=times.exchange * (1 + again / 2),
        exchanged_bytes=times.exchanged_bytes * (1 + again / 2),
        activation_bytes=times.activation_bytes - (saved - largest) * divided,
    )
