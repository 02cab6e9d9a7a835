"""The benchmark of measured clusters: what the lab has set, and how far a measurement is from that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.probing import Difference, difference, line, rate_between, shares_uplink, speeds
from paceline.cluster.topology import Device, DeviceSpeed, HostLink, HostRanks, Topology
from paceline.lab.description import Description, ready


def perfect(cluster: Description) -> Topology:
    """The cluster as an exact measurement finds it."""
    flops, hosts, first = speeds(cluster), [], 0
    for host in cluster.hosts:
        ranks = tuple(range(first, first := first + host.workers))
        hosts.append(
            HostRanks(host.name, ranks, "", devices=tuple(Device("cpu", speeds=(DeviceSpeed("float32", flops[rank]),)) for rank in ranks))
        )
    links = []
    for a in range(len(hosts)):
        for b in range(len(hosts)):
            if a != b:
                rate = rate_between(cluster, a, b)
                links.append(HostLink(a, b, 1e-4, rate, rate / (2 if shares_uplink(cluster, a, b) else 1)))
    return Topology(tuple(hosts), tuple(links))


def test_what_the_lab_sets() -> None:
    unequal, racks, pairs = ready("unequal"), ready("racks"), ready("two-hosts")
    assert speeds(unequal) == [1, 0.5, 0.5] and speeds(pairs) == [1] * 4
    rates = {(a, b): round(8e-6 * rate_between(unequal, a, b) / 0.956) for a in range(3) for b in range(3) if a != b}
    assert rates == {(0, 1): 1000, (1, 0): 1000, (0, 2): 100, (1, 2): 100, (2, 0): 50, (2, 1): 50}
    sharing = {(a, b) for a in range(4) for b in range(4) if a != b and shares_uplink(racks, a, b)}
    assert sharing == {(0, 2), (1, 3), (2, 0), (3, 1)}
    assert not any(shares_uplink(unequal, a, b) for a in range(3) for b in range(3) if a != b)


@pytest.mark.parametrize("name", ["racks", "unequal", "two-hosts"])
def test_an_exact_measurement_is_not_off(name: str) -> None:
    cluster = ready(name)
    exact = perfect(cluster)
    assert difference(cluster, [exact] * 3, [2.0, 9.0, 4.0]) == Difference(0, 0, 4, True)
    off = replace(exact, links=(replace(exact.links[0], bytes_per_second=exact.links[0].bytes_per_second * 0.7), *exact.links[1:]))
    assert difference(cluster, [exact, off, exact], [1.0] * 3).link == 0
    assert difference(cluster, [off, off, exact], [1.0] * 3).link == pytest.approx(0.3)


def test_a_bar_that_is_missed() -> None:
    assert line("x", Difference(0.09, 0.04, 19, True))[1] and "kept" in line("x", Difference(0.09, 0.04, 19, True))[0]
    for missed in (Difference(0.11, 0, 1, True), Difference(0, 0.06, 1, True), Difference(0, 0, 21, True), Difference(0, 0, 1, False)):
        assert not line("x", missed)[1] and "MISSED" in line("x", missed)[0]


def test_an_uplink_that_was_not_seen() -> None:
    racks = ready("racks")
    exact = perfect(racks)
    blind = replace(exact, links=tuple(replace(link, crowded_bytes_per_second=link.bytes_per_second) for link in exact.links))
    assert not difference(racks, [blind], [1.0]).shared
