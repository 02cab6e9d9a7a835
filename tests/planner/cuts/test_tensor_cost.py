"""Prices of workers that divide layers: alone, and as replicas of a group."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.planner.candidates import Candidate, list_candidates
from paceline.planner.cuts.tensor_cost import merge_groups, price_tensor
from paceline.planner.planned_cluster import PlannedCluster, describe_this_host
from paceline.planner.search import find_tensor_conditions
from tests.harness.cut_plans import make_cut_profile
from tests.harness.plans import BATCH, make_hosts

PROFILE = make_cut_profile()
WORKER = PROFILE.tensor_workers[0].profile


def list_divided(cluster: PlannedCluster) -> list[Candidate]:
    return [
        each
        for each in list_candidates(cluster, lossy=False, cuts=PROFILE.possible_cuts)
        if each.tensor > 1 and not each.recompute
    ]


def test_a_group_takes_what_was_measured() -> None:
    (candidate,) = list_divided(describe_this_host(2, 2))
    cost = price_tensor(PROFILE, candidate)
    measured = WORKER.conditions[0].predict_step(BATCH).seconds
    assert cost.step.seconds == pytest.approx(measured)
    assert cost.step.parts["exchange"] == pytest.approx(0.002)
    assert sum(cost.step.parts.values()) == pytest.approx(cost.step.seconds)
    assert cost.step.within_bytes == 2 * 1000 * BATCH
    assert cost.state_bytes == sum(WORKER.state_bytes)
    assert cost.activation_bytes == 1000 * BATCH / 2
    assert (candidate.mesh, candidate.cut) == ("tensor=2", 'tensor("auto")')


def test_groups_are_replicas() -> None:
    cluster = make_hosts(2, workers=2, cores=2)
    candidate = list_divided(cluster)[-1]
    assert candidate.mesh == "data=2, tensor=2" and candidate.cluster.workers == 4
    cost = price_tensor(PROFILE, candidate)
    alone = WORKER.conditions[0].predict_step(BATCH / 2)
    assert cost.step.seconds > alone.seconds
    # Each of the two workers of a group exchanges its part with its twin on the other host.
    assert cost.step.between_bytes == pytest.approx(2 * 2 * WORKER.trained_bytes, rel=0.1)
    # A slower link shows.
    slow = make_hosts(2, workers=2, cores=2, bytes_per_second=1e6)
    assert price_tensor(PROFILE, list_divided(slow)[-1]).step.seconds > 2 * cost.step.seconds


def test_groups_stay_on_one_host() -> None:
    assert list_divided(make_hosts(4)) == []
    # Three workers can't be groups of two; two of one host can.
    (only,) = list_divided(make_hosts(2, workers=3, cores=3))
    assert only.cluster.workers == 2 and len(only.cluster.hosts) == 1


def test_a_group_keeps_its_host_busy() -> None:
    cluster = describe_this_host(4, 4)
    merged = merge_groups(cluster, 2)
    assert merged.workers == 2 and merged.hosts[0].threads == 2
    assert merged.machine_load(0) == cluster.machine_load(0)


def test_checkpoints_save_memory_and_take_time() -> None:
    (candidate,) = list_divided(describe_this_host(2, 2))
    plain, again = (
        price_tensor(PROFILE, replace(candidate, recompute=recompute))
        for recompute in (False, True)
    )
    assert again.step.seconds > plain.step.seconds
    assert again.activation_bytes < plain.activation_bytes


def test_whole_groups_are_measured() -> None:
    host, boxes = describe_this_host(2, 2), make_hosts(2, workers=2, cores=8, threads=4)
    assert find_tensor_conditions(list_divided(host), 2) == {(2, 2, 1): (1.0,)}
    # Hosts with cores for all are imitated by as few workers as a group has.
    assert find_tensor_conditions(list_divided(boxes), 2) == {(2, 2, 2): (1.0, 2.0)}
