"""How fast the workers of a cluster are, compared with the copies that were measured here."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from paceline.planner.model_profile import TIMED_PARTS, MeasuredCondition, ModelProfile, StepTimes
from paceline.planner.planned_cluster import PlannedCluster, PlannedHost

MOST_PROCESSES: Final = 8  # processes that are measured at once


def imitate_host(cluster: PlannedCluster, index: int, cores: int) -> tuple[int, int]:
    """Choose the processes and threads that load this machine as much as that host's is loaded."""
    threads = min(cluster.hosts[index].threads, cores)
    return max(
        1, min(MOST_PROCESSES, round(cluster.machine_load(index) * cores / threads))
    ), threads


def find_measured(
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


def scale_times(times: StepTimes, speed: float) -> StepTimes:
    """Scale all seconds of a step to a worker that is `speed` times as fast."""
    return replace(times, **{name: getattr(times, name) / speed for name in TIMED_PARTS})
