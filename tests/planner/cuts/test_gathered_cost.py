"""Prices of `shard(zero=3)`: what is hidden behind computing, what isn't, and the memory."""

from __future__ import annotations

import pytest

from paceline.notation import parse_cuts
from paceline.parallel.shard import shard
from paceline.planner.candidates import Candidate, list_candidates
from paceline.planner.cuts.gathered_cost import price_gathered
from paceline.planner.planned_cluster import PlannedCluster, describe_this_host
from tests.harness.cut_plans import LAYERS, make_cut_profile
from tests.harness.plans import BATCH, make_hosts

PROFILE = make_cut_profile(tensor=False)
NBYTES = PROFILE.state_bytes[0]


def find_gathered(cluster: PlannedCluster) -> Candidate:
    return next(
        each
        for each in list_candidates(cluster, lossy=False, cuts=PROFILE.possible_cuts)
        if each.zero == 3 and each.cluster.workers == cluster.workers
    )


def test_units_are_repeated_layers() -> None:
    candidate = find_gathered(describe_this_host(2, 2))
    assert candidate.units == ("blocks.*",) and candidate.kind == "sharded"
    assert parse_cuts(candidate.cut) == (shard("blocks.*", zero=3),)


def test_several_patterns_are_written_as_the_notation_reads_them() -> None:
    candidate = Candidate("sharded", make_hosts(2), (0, 1), zero=3, units=("up.*", "down.*"))
    assert parse_cuts(candidate.cut) == (shard(("up.*", "down.*"), zero=3),)


def test_workers_without_an_idle_core_wait_for_all_exchanges() -> None:
    full, roomy = (
        price_gathered(PROFILE, find_gathered(make_hosts(1, workers=2, cores=cores))).step
        for cores in (2, 8)
    )
    computed = PROFILE.conditions[1].predict_step(BATCH / 2)
    for step in (full, roomy):
        assert step.parts["forward"] == pytest.approx(computed.forward)
        assert step.parts["optimizer"] == pytest.approx(computed.optimizer / 2)
        assert sum(step.parts.values()) == pytest.approx(step.seconds)
        # Each unit is gathered twice, and its sum is cut once. The model has nothing but units.
        assert step.within_bytes == pytest.approx(2 * NBYTES / 2 + NBYTES)
    assert full.parts["exchange"] > 2 * roomy.parts["exchange"]


def test_a_slow_link_is_waited_for() -> None:
    fast, slow = (
        price_gathered(PROFILE, find_gathered(make_hosts(2, bytes_per_second=rate, cores=4))).step
        for rate in (1e12, 1e7)
    )
    # Two gathers and the half of an all-reduce, each sends half of the model from both hosts.
    assert slow.between_bytes == pytest.approx(3 * NBYTES)
    assert slow.seconds - fast.seconds >= 3 * NBYTES / 2 / 1e7 * 0.6
    assert {event.lane for event in slow.events} == {"workers", "exchange"}
    ends = [event.end for event in slow.events if event.lane == "exchange"]
    assert ends == sorted(ends)


def test_memory_has_a_part_of_the_states_and_two_units() -> None:
    for workers in (2, 4):
        cost = price_gathered(PROFILE, find_gathered(make_hosts(workers)))
        unit = NBYTES / LAYERS
        # Two units are whole, and the gradients of two are on their way.
        assert cost.state_bytes == pytest.approx(sum(PROFILE.state_bytes) / workers + 4 * unit)
        assert cost.activation_bytes == 1000 * BATCH / workers
