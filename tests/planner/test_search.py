"""Candidates and their prices: conditions to measure, unequal workers, and the best way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.formatting import format_as_call
from paceline.notation import parse_strategy
from paceline.planner.candidates import list_candidates, take_workers
from paceline.planner.planned_cluster import PlannedCluster, describe_this_host
from paceline.planner.search import (
    choose_best,
    find_conditions,
    imitate_host,
    price_candidate,
    price_candidates,
)
from tests.harness.plans import BATCH, make_condition, make_hosts, make_profile


def test_candidates_of_one_host() -> None:
    found = [each.describe() for each in list_candidates(describe_this_host(2, 2), lossy=False)]
    sharded = ["2 workers, shard(zero=1)", "2 workers, shard(zero=2)"]
    assert found == ["1 worker", "2 workers", *sharded]
    lossy = [each.describe() for each in list_candidates(describe_this_host(2, 2), lossy=True)]
    assert lossy == [*found, "2 workers, LocalSGD(8)", "2 workers, LocalSGD(32)"]


def test_strategies_are_written_as_everywhere() -> None:
    """A strategy that a user pins, or that a run had, is found among the candidates by its text."""
    hosts = make_hosts(2)
    texts = {each.sync for each in list_candidates(hosts, lossy=True)} - {""}
    assert {format_as_call(parse_strategy(text)) for text in texts} == texts and len(texts) > 2


def test_candidates_of_several_hosts() -> None:
    found = {
        each.describe() for each in list_candidates(make_hosts(3, workers=2, cores=2), lossy=True)
    }
    assert {
        "1 worker",
        "2 workers",
        "2 workers on 2 hosts",
        "4 workers on 2 hosts",
        "6 workers on 3 hosts",
        "6 workers on 3 hosts, AllReduce(codec=int8())",
        "6 workers on 3 hosts, LocalSGD(8)",
    } <= found


def test_only_unequal_workers_get_shares_by_speed() -> None:
    equal = make_hosts(2, flops=(1e10, 1e10))
    assert not any(each.by_speed for each in list_candidates(equal, lossy=False))
    unequal = make_hosts(2, flops=(1e10, 2e10))
    assert any(each.by_speed for each in list_candidates(unequal, lossy=False))


def test_the_fastest_host_is_taken_first() -> None:
    cluster = make_hosts(3, flops=(1e10, 3e10, 2e10))
    chosen = [
        each.host_indices
        for each in list_candidates(cluster, lossy=False)
        if not each.by_speed and not each.zero
    ]
    assert chosen == [(1,), (1, 2), (0, 1, 2)]


def test_fewer_workers_have_more_threads() -> None:
    cluster = describe_this_host(4, 8)
    assert cluster.hosts[0].threads == 2
    assert take_workers(cluster, {0: 1}).hosts[0].threads == 8
    assert take_workers(cluster, {0: 2}).hosts[0].threads == 4
    assert take_workers(cluster, {0: 4}) is cluster


def test_hosts_of_one_machine_divide_its_cores() -> None:
    cluster = make_hosts(4, cores=4)
    shared = replace(
        cluster, hosts=tuple(replace(host, machine="m", threads=1) for host in cluster.hosts)
    )
    assert [host.threads for host in take_workers(shared, {0: 1, 2: 1}).hosts] == [2, 2]
    assert take_workers(shared, {3: 1}).hosts[0].threads == 4


def test_a_loaded_machine_is_imitated_by_processes() -> None:
    assert imitate_host(describe_this_host(2, 2), 0, 2) == (2, 1)
    assert imitate_host(describe_this_host(1, 2), 0, 2) == (1, 2)
    # Four workers of one thread on two cores wait for each other as much here.
    assert imitate_host(describe_this_host(4, 2), 0, 2) == (4, 1)
    # A large machine whose workers have a core for each of their threads.
    assert imitate_host(describe_this_host(4, 16), 0, 2) == (1, 2)
    # Half a core of a control group leaves the machine idle.
    quota = replace(describe_this_host(1, 2).hosts[0], quota=0.5, threads=1)
    assert imitate_host(PlannedCluster((quota,), "test"), 0, 2) == (1, 1)


def test_conditions_are_measured_once_each() -> None:
    conditions = find_conditions(list_candidates(describe_this_host(2, 2), lossy=True), 2)
    assert conditions == {(1, 2): (1.0,), (2, 1): (2.0,)}
    hosts = find_conditions(list_candidates(make_hosts(4, cores=2, threads=2), lossy=True), 2)
    assert hosts == {(1, 2): (1.0, 3.0, 4.0)}


def test_two_workers_halve_what_scales() -> None:
    profile = make_profile(
        (make_condition(1, 1, optimizer=0.0, fixed=0.0),), parameters=1, numel=10
    )
    alone, both, *_ = (
        price_candidate(profile, each)
        for each in list_candidates(make_hosts(2, bytes_per_second=1e12), lossy=False)
    )
    assert alone.samples_per_second == pytest.approx(BATCH / 0.064)
    assert both.step.seconds == pytest.approx(0.032, rel=0.05)


def test_what_does_not_scale_decides() -> None:
    """A large optimizer step is made by each worker, so two are hardly faster than one."""
    profile = make_profile((make_condition(1, 1, optimizer=1.0),))
    exact = price_candidates(
        profile, list_candidates(make_hosts(2, bytes_per_second=1e9), lossy=False)
    )
    whole = [each for each in exact if not each.candidate.cut]
    assert whole[0].step.seconds > 0.95 * whole[-1].step.seconds
    # If each worker steps half of the parameters, it does.
    assert exact[0].candidate.zero and exact[0].step.seconds < 0.6 * whole[-1].step.seconds


def test_slower_devices_take_longer() -> None:
    profile = make_profile((make_condition(1, 1, flops=1e10),))
    times = [
        price_candidate(
            profile, next(iter(list_candidates(make_hosts(1, flops=(flops,)), lossy=False)))
        )
        for flops in (1e10, 5e9)
    ]
    assert times[1].step.seconds == pytest.approx(2 * times[0].step.seconds)


def test_shares_by_speed_end_together() -> None:
    profile = make_profile((make_condition(1, 1, flops=1e10, fixed=0.0, optimizer=0.0),))
    cluster = make_hosts(2, flops=(1e10, 3e10), bytes_per_second=1e12)
    by_speed = next(each for each in list_candidates(cluster, lossy=False) if each.by_speed)
    priced = price_candidate(profile, by_speed)
    assert priced.shares == pytest.approx((0.25, 0.75), abs=0.01)
    equal = price_candidate(profile, replace(by_speed, by_speed=False))
    assert priced.step.seconds < 0.6 * equal.step.seconds


def test_a_correction_is_for_steps_of_several_workers() -> None:
    profile = make_profile()
    for candidate in list_candidates(make_hosts(2), lossy=False):
        usual = price_candidate(profile, candidate).step
        corrected = price_candidate(profile, candidate, 2.0).step
        factor = 2.0 if candidate.cluster.workers > 1 else 1.0
        assert corrected.seconds == pytest.approx(factor * usual.seconds)
        assert sum(corrected.parts.values()) == pytest.approx(corrected.seconds)


def test_memory_has_states_buckets_and_activations() -> None:
    profile = make_profile()
    alone, both, one, two = (
        price_candidate(profile, each) for each in list_candidates(make_hosts(2), lossy=False)
    )
    states, gradients = sum(profile.state_bytes), profile.state_bytes[1]
    assert alone.memory_bytes == states + 1000 * BATCH
    assert both.memory_bytes == states + gradients + 1000 * BATCH / 2
    assert both.memory_bytes - one.memory_bytes == profile.state_bytes[2] / 2
    assert one.memory_bytes - two.memory_bytes == gradients / 2


def test_the_simplest_of_equally_fast_ways_is_chosen() -> None:
    profile = make_profile((make_condition(1, 1, optimizer=0.0),), parameters=1, numel=10)
    cluster = make_hosts(2, bytes_per_second=1e12)
    priced = price_candidates(profile, list_candidates(cluster, lossy=True))
    assert choose_best(priced).candidate.kind == "data parallel"
    # Nothing is gained by a second worker: one is simpler.
    stuck = make_profile((make_condition(1, 1, each=0.0, fixed=0.1),))
    priced = price_candidates(stuck, list_candidates(cluster, lossy=False))
    assert choose_best(priced).candidate.cluster.workers == 1
