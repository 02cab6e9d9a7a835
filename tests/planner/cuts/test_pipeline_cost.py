"""Prices of pipelines: the schedule that would run, its messages, and what stages hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.notation import parse_cuts
from paceline.parallel.pipelining.schedules import make_schedule
from paceline.parallel.pipelining.simulate import make_even_times, simulate_schedule
from paceline.planner import exchange_cost
from paceline.planner.candidates import Candidate, list_candidates
from paceline.planner.cuts.pipeline_cost import price_pipeline
from paceline.planner.planned_cluster import PlannedCluster, describe_this_host
from tests.harness.cut_plans import SAMPLE_SECONDS, make_cut_profile
from tests.harness.plans import BATCH, make_hosts

PROFILE = make_cut_profile()


def list_pipelines(cluster: PlannedCluster) -> list[Candidate]:
    return [
        each
        for each in list_candidates(cluster, lossy=False, cuts=PROFILE.possible_cuts)
        if each.stages > 1
    ]


def find_pipeline(cluster: PlannedCluster, *, stages: int = 2, count: int = 4) -> Candidate:
    return next(
        each
        for each in list_pipelines(cluster)
        if (each.schedule, each.micro_batches) == ("1f1b", count)
        and each.stages == stages
        and each.cluster.workers == cluster.workers
        and not each.recompute
    )


def test_a_step_is_its_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without overheads it takes as long as the drawing of the schedule says."""
    monkeypatch.setattr(exchange_cost, "ACTION_SECONDS", 0.0)
    monkeypatch.setattr(exchange_cost, "ACCUMULATE_TRAFFIC", 0.0)
    monkeypatch.setattr(exchange_cost, "STEP_SECONDS", 0.0)
    cost = price_pipeline(PROFILE, find_pipeline(describe_this_host(2, 2)))
    schedule = make_schedule("1f1b", 2, 4, None)
    one = SAMPLE_SECONDS * BATCH / 4 / 2  # a micro-batch on a stage
    drawn = simulate_schedule(schedule, make_even_times(schedule, one / 3, one * 2 / 3)).makespan
    optimizer = 0.002 / 2
    assert cost.candidate.split == (2, 2)
    assert cost.step.seconds == pytest.approx(drawn + optimizer, rel=0.02)
    assert sum(cost.step.parts.values()) == pytest.approx(cost.step.seconds)


def test_more_micro_batches_have_a_smaller_bubble() -> None:
    few, many = (
        price_pipeline(PROFILE, find_pipeline(describe_this_host(2, 2), count=count))
        for count in (4, 8)
    )
    assert many.step.parts["exchange"] < few.step.parts["exchange"]


def test_a_slow_link_makes_stages_wait() -> None:
    fast, slow = (
        price_pipeline(PROFILE, find_pipeline(make_hosts(2, bytes_per_second=rate)))
        for rate in (1e9, 1e5)
    )
    # Activations go there and back once for each sample.
    assert fast.step.between_bytes == slow.step.between_bytes == 2 * 50 * BATCH
    assert slow.step.seconds > fast.step.seconds + 0.9 * 50 * BATCH / 1e5
    assert slow.step.within_bytes == 0


def test_stages_of_one_host_send_inside_it() -> None:
    """Two hosts of two workers: each host has a replica, and only gradients cross the link."""
    cluster = make_hosts(2, workers=2, cores=2)
    cost = price_pipeline(PROFILE, find_pipeline(cluster))
    assert cost.candidate.mesh == "data=2, stage=2"
    assert cost.step.within_bytes == 2 * 50 * BATCH
    gradients = PROFILE.trained_bytes
    assert cost.step.between_bytes == pytest.approx(2 * gradients, rel=0.1)


def test_a_worker_holds_its_stage() -> None:
    """The first of two stages keeps two micro-batches under 1f1b, and half of the states."""
    cost = price_pipeline(PROFILE, find_pipeline(describe_this_host(2, 2)))
    assert cost.state_bytes == pytest.approx(sum(PROFILE.state_bytes) / 2)
    kept = 2 * 200 * BATCH / 4  # of a micro-batch in two layers
    assert cost.activation_bytes == pytest.approx(2 * kept)


def test_checkpoints_save_memory_and_take_time() -> None:
    plain = find_pipeline(describe_this_host(2, 2))
    cost, again = (
        price_pipeline(PROFILE, replace(plain, recompute=recompute)) for recompute in (False, True)
    )
    assert again.step.seconds > cost.step.seconds
    assert again.activation_bytes < cost.activation_bytes


def test_slower_places_get_fewer_layers() -> None:
    cluster = make_hosts(2, flops=(1e10, 3e10))
    split = price_pipeline(PROFILE, find_pipeline(cluster)).candidate.split
    assert split in {(1, 3), (3, 1)}


def test_all_pipelines_can_be_written_as_options() -> None:
    cluster = make_hosts(2, workers=2, cores=2)
    for candidate in list_pipelines(cluster):
        if candidate.recompute:
            continue
        cost = price_pipeline(PROFILE, candidate)
        (cut,) = parse_cuts(cost.candidate.cut)
        assert sum(cut.split) == 4 and cut.axis == "stage"


def test_no_pipeline_without_layers_or_steps() -> None:
    cuts = replace(PROFILE, takes_steps=False).possible_cuts
    cluster = describe_this_host(2, 2)
    assert not any(each.stages > 1 for each in list_candidates(cluster, lossy=False, cuts=cuts))
