"""Rates of the hosts' links, measured between threads, and the same on all workers."""

from __future__ import annotations

from paceline.cluster.topology import HostRanks, Topology
from paceline.comm.agreement import Agreement
from paceline.comm.threads import ThreadGroup, spawn
from paceline.session.probe.host_rates import facts, measure, of_hosts
from paceline.sync.route_choice import RouteFacts

CLUSTER = Topology((HostRanks("a", (0, 3), "", 4), HostRanks("b", (1,), "", 4), HostRanks("c", (2,), "", 1)))


def test_all_workers_learn_the_same() -> None:
    def body(group: ThreadGroup) -> RouteFacts:
        return facts(Agreement(group), CLUSTER)

    found = spawn(4, body)
    assert all(each == found[0] for each in found)
    assert len(found[0].rates) == 3 and min(found[0].rates) > 0 < found[0].seconds
    assert found[0].cores == 1.0, "where there are fewest"


def test_every_pair_of_hosts_is_measured_in_both_directions() -> None:
    rates, latency = spawn(4, lambda group: measure(Agreement(group), CLUSTER, 0.005))[0]
    assert set(rates) == {(a, b) for a in range(3) for b in range(3) if a != b} and latency > 0


def test_the_link_of_a_host_is_the_better_of_its_pairs_and_the_worse_of_its_directions() -> None:
    rates = {(0, 1): 100.0, (1, 0): 90.0, (0, 2): 10.0, (2, 0): 50.0, (1, 2): 10.0, (2, 1): 50.0}
    assert of_hosts(rates) == (90.0, 90.0, 10.0)
