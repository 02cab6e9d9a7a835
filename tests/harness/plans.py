"""Profiles and clusters for tests of the planner, without any measurement."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.comm.schedule import LinkSpeed
from paceline.planner.model_profile import (
    GradientProfile,
    MeasuredCondition,
    ModelProfile,
    StepTimes,
)
from paceline.planner.planned_cluster import PlannedCluster, PlannedHost

BATCH = 64


def make_times(
    samples: int, *, fixed: float = 0.001, each: float = 0.001, optimizer: float = 0.002
) -> StepTimes:
    """Make times of a step: a third of each sample's time in forward, the rest in backward."""
    computing = fixed + each * samples
    return StepTimes(
        samples, 0.0, computing / 3, computing * 2 / 3, optimizer, 0.0, 0.02, 1000.0 * samples
    )


def make_condition(
    processes: int = 1, threads: int = 1, *, flops: float = 1e10, **times: float
) -> MeasuredCondition:
    """Make a condition in which each sample takes as long."""
    steps = tuple(make_times(samples, **times) for samples in (8, 16, 32, BATCH))
    return MeasuredCondition(processes, threads, flops, 1e10, 1.0, steps)


def make_profile(
    conditions: Sequence[MeasuredCondition] = (),
    *,
    parameters: int = 10,
    numel: int = 100_000,
    cores: int = 2,
) -> ModelProfile:
    """Make a profile of a model of equal parameters, whose gradients come at equal intervals."""
    gradients = tuple(
        GradientProfile(numel, "float32", (index + 1) / parameters) for index in range(parameters)
    )
    nbytes = 4 * numel * parameters
    return ModelProfile(
        "train.py",
        "here",
        cores,
        BATCH,
        gradients,
        (nbytes, nbytes, 2 * nbytes),
        0,
        0,
        tuple(conditions) or (make_condition(), make_condition(2)),
    )


def make_hosts(
    count: int,
    *,
    workers: int = 1,
    threads: int = 1,
    cores: float = 1.0,
    bytes_per_second: float = 125e6,
    latency: float = 1e-4,
    flops: Sequence[float] = (),
) -> PlannedCluster:
    """Make a cluster of equal hosts. `flops`: of the workers of each host, one value for a host."""
    link = LinkSpeed(latency, bytes_per_second)
    return PlannedCluster(
        tuple(
            PlannedHost(
                f"host{index}",
                workers,
                threads,
                cores,
                None,
                (flops[index],) * workers if flops else (),
                link,
                link,
            )
            for index in range(count)
        ),
        "test.toml",
    )
