"""What is odd about a cluster: each oddity by itself, planted in a cluster of which nothing is
odd.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.cluster.topology import Device, DeviceSpeed, HostLink, HostRanks, Interface, Topology
from paceline.unequal.probe.oddities import find_oddities, format_rate

FAST = Device(
    "cpu",
    0,
    "some",
    8 << 30,
    4 << 30,
    1,
    (DeviceSpeed("float32", 1e11, 0.02),),
    2e10,
    0.99,
    3e9,
    3.2e9,
    "schedutil",
)
RATE = 1.2e8


def cluster(count: int = 4, workers: int = 1, **links: Any) -> Topology:
    hosts = tuple(
        HostRanks(
            f"h{index}",
            tuple(range(index * workers, (index + 1) * workers)),
            f"10.0.0.{index}",
            workers,
            (FAST,) * workers,
            None,
            f"machine{index}",
            workers,
            (Interface("eth0", f"10.0.0.{index}", "10.0.0.0/24", 1e9),),
        )
        for index in range(count)
    )
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    return Topology(hosts, tuple(HostLink(a, b, 1e-4, RATE, RATE) for a, b in pairs))


def with_device(topology: Topology, rank: int, **fields: Any) -> Topology:
    index = topology.host_by_rank()[rank]
    host = topology.hosts[index]
    devices = tuple(
        replace(device, **fields) if each == rank else device
        for each, device in zip(host.ranks, host.devices, strict=True)
    )
    return with_host(topology, index, devices=devices)


def with_host(topology: Topology, index: int, **fields: Any) -> Topology:
    hosts = tuple(
        replace(host, **fields) if each == index else host
        for each, host in enumerate(topology.hosts)
    )
    return replace(topology, hosts=hosts)


def with_links(topology: Topology, among: Any, **fields: Any) -> Topology:
    return replace(
        topology,
        links=tuple(replace(link, **fields) if among(link) else link for link in topology.links),
    )


def slow(flops: float) -> tuple[DeviceSpeed, ...]:
    return (DeviceSpeed("float32", flops, 0.02),)


@pytest.mark.parametrize(("count", "workers"), [(1, 1), (1, 4), (2, 2), (4, 1), (8, 1)])
def test_nothing_is_odd_about_equal_machines(count: int, workers: int) -> None:
    assert find_oddities(cluster(count, workers)) == []


def test_what_was_not_measured_is_not_odd() -> None:
    assert (
        find_oddities(
            Topology((HostRanks("a", (0,), "10.0.0.1"), HostRanks("b", (1,), "10.0.0.2")))
        )
        == []
    )


def test_a_device_at_half_the_speed_of_its_siblings() -> None:
    [said] = find_oddities(with_device(cluster(), 2, speeds=slow(5e10)))
    assert said == "rank 2 on h2 multiplies float32 at 0.50 of the fastest cpu"
    assert find_oddities(with_device(cluster(), 2, speeds=slow(7e10))) == []
    # no siblings
    assert (
        find_oddities(with_device(cluster(), 2, speeds=slow(1e9), kind="cuda", clock_hz=0.0)) == []
    )


def test_a_device_has_one_line_for_all_dtypes() -> None:
    topology = cluster()
    for rank, (single, half) in enumerate(((1e11, 3e11), (1e11, 3e11), (5e10, 1e11), (1e11, 3e11))):
        topology = with_device(
            topology, rank, speeds=(DeviceSpeed("float32", single), DeviceSpeed("bfloat16", half))
        )
    assert find_oddities(topology) == [
        "rank 2 on h2 multiplies float32 at 0.50 and bfloat16 at 0.33 of the fastest cpu"
    ]


@pytest.mark.parametrize(
    ("device", "host", "why"),
    [
        ({"attended": 0.5}, {"quota": 0.5}, ": a quota leaves h2 0.5 of a core"),
        ({"name": "older"}, {}, ": it is older, others differ"),
        ({"threads": 0}, {}, ": it computes with 0 threads, others with up to 1"),
    ],
)
def test_why_a_device_is_slow(device: dict[str, Any], host: dict[str, Any], why: str) -> None:
    [said] = find_oddities(
        with_host(with_device(cluster(), 2, speeds=slow(5e10), **device), 2, **host)
    )
    assert said == f"rank 2 on h2 multiplies float32 at 0.50 of the fastest cpu{why}"


def test_a_processor_that_others_use() -> None:
    found = find_oddities(with_device(cluster(), 2, speeds=slow(5e10), attended=0.5))
    assert (
        found[0].endswith(": it had its cores 50% of the time")
        and "rank 2 on h2 had its cores 50% of the time it computed" in found[1]
    )
    assert find_oddities(with_host(with_device(cluster(), 2, attended=0.5), 2, quota=0.5)) == []
    both = with_device(with_device(cluster(1, 3), 1, attended=0.7), 2, attended=0.6)
    assert find_oddities(both) == [
        (
            "rank 1 (and 1 more) on h0 had its cores 60% of the time it computed: "
            "other programs use them"
        )
    ]


def test_slow_memory() -> None:
    [said] = find_oddities(with_device(cluster(), 1, copied_bytes_per_second=5e9))
    assert said.startswith("rank 1 on h1 copies memory at 0.25 of the fastest cpu")
    # that it waits says enough
    assert (
        len(find_oddities(with_device(cluster(), 1, copied_bytes_per_second=5e9, attended=0.2)))
        == 1
    )


def test_threads_that_fight() -> None:
    topology = with_device(
        with_device(cluster(1, 2), 0, threads=2, attended=1.0), 1, threads=2, attended=1.0
    )
    [said] = find_oddities(topology)
    assert (
        said.startswith("the workers of h0 compute with 4 threads on 2 cores")
        and "give each 1 (--threads)" in said
    )
    crowd = with_host(cluster(1, 4), 0, cores=2)
    [said] = find_oddities(crowd)
    assert "4 threads on 2 cores" in said and said.endswith("start 2 of them at most")


def test_hosts_that_are_one_machine() -> None:
    topology = cluster(3)
    for index in range(3):
        topology = with_host(topology, index, machine="one", machine_cores=2)
    [said] = find_oddities(topology)
    assert said.startswith(
        "h0, h1 and h2 are one machine with 2 cores, and their workers could use 3: "
    )
    for index in range(2):
        topology = with_host(topology, index, quota=0.5)
    assert find_oddities(topology) == []


def test_power_saving() -> None:
    [said] = find_oddities(with_device(cluster(), 3, clock_hz=1.2e9, governor="powersave"))
    assert "the processor of h3 stays at 1.2 GHz of 3.2" in said and "governor powersave" in said


def test_a_slow_host_is_named_once_for_each_direction() -> None:
    assert find_oddities(
        with_links(
            cluster(),
            lambda link: link.source == 1,
            bytes_per_second=RATE / 10,
            crowded_bytes_per_second=0,
        )
    ) == ["h1 sends 96 Mbit/s, and the fastest link carries 960 Mbit/s: check its cable and port"]
    [said] = find_oddities(
        with_links(
            cluster(),
            lambda link: link.target == 3,
            bytes_per_second=RATE / 10,
            crowded_bytes_per_second=0,
        )
    )
    assert said.startswith("h3 receives 96 Mbit/s")


def test_a_slow_link_between_two_hosts() -> None:
    only = with_links(
        cluster(),
        lambda link: (link.source, link.target) == (1, 2),
        bytes_per_second=RATE / 10,
        crowded_bytes_per_second=0,
    )
    assert find_oddities(only) == [
        "h1 to h2 carries 96 Mbit/s, and the fastest link here 960 Mbit/s"
    ]
    two = cluster(2)
    assert find_oddities(
        with_links(
            two,
            lambda link: link.source == 0,
            bytes_per_second=RATE / 10,
            crowded_bytes_per_second=0,
        )
    ) == ["h0 to h1 carries 96 Mbit/s, and the fastest link here 960 Mbit/s"]


def test_a_long_way() -> None:
    [said] = find_oddities(
        with_links(
            cluster(), lambda link: (link.source, link.target) == (0, 3), latency_seconds=0.02
        )
    )
    assert said == "h0 to h3 takes 20.0 ms, and 0.10 ms are typical here"


def test_a_shared_uplink() -> None:
    """Hosts 0, 1 and 2, 3 are in two racks: what crosses in the round of shift 2 shares the
    uplinks, unequally.
    """
    crossing = with_links(
        cluster(),
        lambda link: (link.source, link.target) in {(0, 2), (2, 0)},
        crowded_bytes_per_second=0.8 * RATE,
    )
    crossing = with_links(
        crossing,
        lambda link: (link.source, link.target) in {(1, 3), (3, 1)},
        crowded_bytes_per_second=0.2 * RATE,
    )
    [said] = find_oddities(crossing)
    assert said.startswith(
        "h0 to h2, h1 to h3, h2 to h0 and h3 to h1 carry 3.84 Gbit/s one at a time, and 1.92 "
        "Gbit/s while all hosts send"
    )
    [one] = find_oddities(
        with_links(
            cluster(),
            lambda link: (link.source, link.target) == (0, 2),
            crowded_bytes_per_second=0.5 * RATE,
        )
    )
    assert one == (
        "h0 to h2 carries 960 Mbit/s alone, and 480 Mbit/s while all hosts send: "
        "it shares a switch or an uplink"
    )
    same = replace(
        crossing,
        hosts=tuple(replace(host, machine="one", machine_cores=9) for host in crossing.hosts),
    )
    assert find_oddities(same) == [said + ", or the cores of one machine"]


def test_a_faster_interface_that_reaches_all() -> None:
    topology = cluster(3)
    for index, host in enumerate(topology.hosts):
        faster = Interface("ib0", f"10.1.0.{index}", "10.1.0.0/24", 1e11)
        # the same address everywhere: it reaches nobody
        docker = Interface("docker0", "172.17.0.1", "172.17.0.0/16", 1e11)
        topology = with_host(topology, index, interfaces=(*host.interfaces, faster, docker))
    found = find_oddities(topology)
    assert len(found) == 3 and all(
        "ib0 could send 100 Gbit/s" in said and "--interface ib0" in said for said in found
    )
    lonely = with_host(topology, 0, interfaces=topology.hosts[0].interfaces[:1])
    assert find_oddities(lonely) == []


def test_the_loopback_reaches_nobody() -> None:
    found = find_oddities(with_host(cluster(2), 0, address="127.0.0.1"))
    assert len(found) == 1 and "h0 is reached at 127.0.0.1, which is its loopback" in found[0]


def test_times_that_lie_apart() -> None:
    [said] = find_oddities(with_device(cluster(), 0, speeds=(DeviceSpeed("float32", 1e11, 0.5),)))
    assert said.startswith("times of rank 0 on h0 lie 50% apart")


def test_rates_in_words() -> None:
    assert [format_rate(each) for each in (1e3, 1.2e8 / 10, 1.2e8, 1.25e9, 3e9)] == [
        "8 kbit/s",
        "96 Mbit/s",
        "960 Mbit/s",
        "1.2 GB/s",
        "3.0 GB/s",
    ]
