"""The simulated step: conserved time, limits that can be worked out by hand, and bytes."""

from __future__ import annotations

import pytest

from paceline.comm.schedule import LinkSpeed
from paceline.planner import exchange_cost as cost
from paceline.planner.exchange_cost import EXACT, INT8
from paceline.planner.planned_cluster import PlannedCluster
from paceline.planner.step_cost import (
    SimulatedStep,
    WorkerLoad,
    choose_exchange,
    lay_out_buckets,
    simulate_step,
)
from tests.harness.plans import make_hosts, make_profile, make_times

PROFILE = make_profile(parameters=30, numel=500_000)
LOAD = lay_out_buckets(PROFILE.gradients)
NBYTES = 4 * 30 * 500_000


def simulate(
    cluster: PlannedCluster, *, samples: int = 32, codec: cost.WireCodec = EXACT, every: int = 1
) -> SimulatedStep:
    return simulate_step(
        cluster,
        [WorkerLoad(make_times(samples), 1e10)] * cluster.workers,
        LOAD,
        choose_exchange(cluster, codec),
        every=every,
    )


def test_buckets_hold_all_bytes_in_their_order() -> None:
    buckets = LOAD.buckets
    assert sum(bucket.nbytes for bucket in buckets) == NBYTES
    assert [bucket.moment for bucket in buckets] == sorted(bucket.moment for bucket in buckets)
    assert buckets[0].nbytes <= 2_000_000 < max(bucket.nbytes for bucket in buckets) <= 8_000_000


def test_one_worker_takes_what_was_measured() -> None:
    step = simulate(make_hosts(1))
    assert step.seconds == pytest.approx(make_times(32).seconds)
    assert step.within_bytes == step.between_bytes == 0


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize(
    "cluster",
    [
        make_hosts(1, workers=2, cores=2),
        make_hosts(2),
        make_hosts(3, workers=2, cores=8),
        make_hosts(4, bytes_per_second=1e6),
    ],
    ids=["one host", "two hosts", "idle cores", "a slow link"],
)
def test_parts_add_up_to_the_step(cluster: PlannedCluster, every: int) -> None:
    step = simulate(cluster, every=every)
    assert sum(step.parts.values()) == pytest.approx(step.seconds)
    assert min(step.parts.values()) >= 0


def test_a_slow_link_decides_alone() -> None:
    """Two hosts: each sends the tensor once, in two halves to and fro."""
    step = simulate(make_hosts(2, bytes_per_second=1e6, latency=0.0))
    assert step.seconds == pytest.approx(NBYTES / 1e6, rel=0.02)


def test_an_endless_link_costs_nothing_on_idle_cores() -> None:
    cluster = make_hosts(2, cores=16, bytes_per_second=1e15, latency=0.0)
    compute = make_times(32).seconds
    # Scaling into buckets, hooks and the fixed cost of a step remain, and the last bucket's way.
    scaling = cost.SCALE_TRAFFIC * NBYTES / 1e10 + 30 * cost.GRADIENT_SECONDS
    last = cost.CROSSING_SECONDS
    assert simulate(cluster).seconds == pytest.approx(
        compute + scaling + cost.STEP_SECONDS + last, rel=1e-3
    )


def test_an_exchange_on_a_full_host_takes_time_from_computing() -> None:
    """On idle cores backward hides the exchange of all buckets but the last."""
    full = simulate(make_hosts(1, workers=2, cores=2))
    idle = simulate(make_hosts(1, workers=2, cores=8))
    assert idle.seconds < full.seconds


@pytest.mark.parametrize("factor", [2, 10])
def test_a_faster_link_never_makes_a_step_longer(factor: float) -> None:
    cluster = make_hosts(3, bytes_per_second=2e7)
    assert simulate(cluster.scale_links(factor)).seconds < simulate(cluster).seconds


def test_bytes_are_those_of_the_schedule() -> None:
    assert simulate(make_hosts(2)).between_bytes == pytest.approx(2 * NBYTES)
    assert simulate(make_hosts(4)).between_bytes == pytest.approx(2 * 3 * NBYTES)
    # One copy of each host crosses the network, whatever the number of its workers.
    assert simulate(make_hosts(2, workers=3)).between_bytes == pytest.approx(2 * NBYTES)


def test_int8_sends_a_quarter_and_wins_on_a_slow_link() -> None:
    cluster = make_hosts(2, bytes_per_second=1e7)
    exact, coded = simulate(cluster), simulate(cluster, codec=INT8)
    assert exact.between_bytes / coded.between_bytes == pytest.approx(cost.INT8_RATIO)
    assert coded.seconds < exact.seconds
    fast = make_hosts(2, cores=16, bytes_per_second=1e15, latency=0.0)
    assert simulate(fast, codec=INT8).seconds > simulate(fast).seconds


def test_rounds_are_spread_over_their_steps() -> None:
    cluster = make_hosts(2, bytes_per_second=1e7)
    own = simulate(cluster, every=10**9).seconds
    eight, sixteen = (simulate(cluster, every=every) for every in (8, 16))
    assert eight.seconds - own == pytest.approx(2 * (sixteen.seconds - own), rel=1e-3)
    assert eight.between_bytes == pytest.approx(2 * sixteen.between_bytes)


def test_the_slowest_worker_decides() -> None:
    cluster = make_hosts(2, bytes_per_second=1e12)
    times = [make_times(16), make_times(48)]
    workers = [WorkerLoad(own, 1e10) for own in times]
    step = simulate_step(cluster, workers, LOAD, choose_exchange(cluster))
    assert step.seconds > times[1].seconds
    assert step.parts["forward"] == times[1].forward


def test_events_of_a_lane_follow_each_other() -> None:
    step = simulate(make_hosts(2, workers=2, cores=2))
    lanes: dict[str, float] = {}
    for event in step.events:
        assert event.end >= event.start >= lanes.get(event.lane, 0.0) - 1e-12
        lanes[event.lane] = event.end
    assert {"link", "worker 0", "worker 3"} <= set(lanes)


def test_links_of_several_speeds_are_priced_by_the_slowest() -> None:
    cluster = make_hosts(2)
    slow = LinkSpeed(1e-4, 1e6)
    hosts = (cluster.hosts[0], cluster.hosts[1].__class__("slow", 1, 1, 1.0, up=slow, down=slow))
    uneven = PlannedCluster(hosts, "test")
    assert simulate(uneven).seconds > 5 * simulate(cluster).seconds
