"""Who measures when: each pair once, and nobody beside those who would disturb it."""

from __future__ import annotations

import pytest

from paceline.cluster.topology import HostRanks, Topology
from paceline.unequal.probe import rounds


def cluster(*machines: str, workers: int = 1) -> Topology:
    """Hosts with so many workers each, on these machines."""
    hosts = [range(index * workers, (index + 1) * workers) for index in range(len(machines))]
    return Topology(
        tuple(
            HostRanks(f"h{i}", tuple(ranks), "", machine=m)
            for i, (ranks, m) in enumerate(zip(hosts, machines, strict=True))
        )
    )


def test_hosts_of_one_machine_compute_one_after_another() -> None:
    assert rounds.plan_compute_waves(cluster("x", "x", "y")) == [[0, 2], [1]]
    assert rounds.plan_compute_waves(cluster("x", "x", "x")) == [[0], [1], [2]]
    assert rounds.plan_compute_waves(cluster("", "")) == [
        [0, 1]
    ]  # machines that don't say who they are


@pytest.mark.parametrize("machines", [("x",), ("x", "x"), ("x", "y", "z"), ("x", "y", "x", "x")])
def test_each_directed_pair_of_hosts_is_measured_once_alone(machines: tuple[str, ...]) -> None:
    topology = cluster(*machines, workers=2)
    found = rounds.plan_between_rounds(topology)
    count = len(machines)
    assert all(len(pairs) == 1 for pairs in found)
    where = topology.host_by_rank()
    assert sorted((where[a], where[b]) for [(a, b)] in found) == [
        (a, b) for a in range(count) for b in range(count) if a != b
    ]


@pytest.mark.parametrize("count", [3, 4, 5, 8])
def test_all_hosts_send_and_receive_once_in_each_crowded_round(count: int) -> None:
    found = rounds.plan_crowded_between(cluster(*["x"] * count))
    assert len(found) == count - 1
    for pairs in found:
        assert sorted(a for a, _ in pairs) == sorted(b for _, b in pairs) == list(range(count))
    assert len({pair for pairs in found for pair in pairs}) == count * (count - 1)


def test_two_hosts_are_no_crowd() -> None:
    assert (
        rounds.plan_crowded_between(cluster("x", "y")) == []
        and rounds.plan_between_rounds(cluster("x")) == []
    )


def test_pairs_inside_hosts_disturb_nobody_on_their_machine() -> None:
    topology = cluster("x", "x", "y", workers=3)
    found = rounds.plan_inside_rounds(topology)
    machines = [topology.hosts[host].machine for host in topology.host_by_rank()]
    for pairs in found:
        assert len({machines[a] for a, _ in pairs}) == len(pairs)
    measured = [pair for pairs in found for pair in pairs]
    assert len(measured) == len(set(measured)) == 3 * 6
    assert all(topology.host_of(a) is topology.host_of(b) for a, b in measured)


def test_of_many_workers_neighbours_alone_are_measured() -> None:
    few, many = cluster("x", workers=rounds.ALL_PAIRS), cluster("x", workers=rounds.ALL_PAIRS + 1)
    assert len(rounds.plan_inside_rounds(few)) == rounds.ALL_PAIRS * (rounds.ALL_PAIRS - 1)
    assert len(rounds.plan_inside_rounds(many)) == 2 * (rounds.ALL_PAIRS + 1)


@pytest.mark.parametrize("workers", [1, 2, 3, 9])
def test_what_is_crowded_was_measured_alone(workers: int) -> None:
    topology = cluster("x", "y", "x", workers=workers)
    for alone, crowded in (
        (rounds.plan_inside_rounds, rounds.plan_crowded_inside),
        (rounds.plan_between_rounds, rounds.plan_crowded_between),
    ):
        single = {pair for pairs in alone(topology) for pair in pairs}
        assert {pair for pairs in crowded(topology) for pair in pairs} <= single
    assert all(
        len(pairs) == len({a for a, _ in pairs}) for pairs in rounds.plan_crowded_inside(topology)
    )
