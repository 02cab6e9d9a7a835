"""The tables of a measured cluster."""

from __future__ import annotations

from dataclasses import replace

from paceline.cluster.topology import Device, DeviceSpeed, HostLink, HostRanks, Topology
from paceline.observe.cluster_report import describe_cluster

SPEEDS = (DeviceSpeed("float32", 8e10), DeviceSpeed("bfloat16", 2e11))
DEVICE = Device("cpu", 0, "some", 8_000_000_000, 4_000_000_000, 2, SPEEDS, 2e10, 2.0)
HALF = replace(DEVICE, speeds=(DeviceSpeed("float32", 5.6e10), DeviceSpeed("bfloat16", 1.4e11)))
HOSTS = (
    HostRanks("a", (0, 2), "10.0.0.1", 4, (DEVICE, HALF)),
    HostRanks("b", (1,), "10.0.0.2", 2, (replace(DEVICE, kind="cuda", index=1),), 1.5),
)
LINKS = (HostLink(0, 0, 1e-5, 3e9), HostLink(0, 1, 1e-4, 1.2e8, 6e7), HostLink(1, 0, 2e-4, 1.1e8))


def test_workers_and_links_have_their_lines() -> None:
    lines = [line.split() for line in describe_cluster(Topology(HOSTS, LINKS)).splitlines()]
    assert lines[0] == ["3", "workers", "on", "2", "hosts"]
    free = ["20", "GB/s", "4.0", "GB", "of", "8.0", "GB"]
    assert lines[2] == [
        "0",
        "a",
        "cpu",
        "some",
        "2",
        "threads,",
        "4",
        "cores",
        "80",
        "200",
        "1.00",
        *free,
    ]
    assert lines[3] == [
        "2",
        "a",
        "cpu",
        "some",
        "2",
        "threads,",
        "4",
        "cores",
        "56",
        "140",
        "0.70",
        *free,
    ]
    assert lines[4] == [
        "1",
        "b",
        "cuda:1",
        "some",
        "2",
        "threads,",
        "a",
        "quota",
        "of",
        "1.5",
        "80",
        "200",
        "1.00",
        *free,
    ]
    assert lines[7] == ["a", "b"]
    assert lines[8] == [
        "a",
        "0.01",
        "ms,",
        "3.0",
        "GB/s",
        "0.10",
        "ms,",
        "960",
        "Mbit/s,",
        "480",
        "Mbit/s",
    ]
    assert lines[9] == ["b", "0.20", "ms,", "880", "Mbit/s", "-"]
    assert (
        lines[11] == ["what", "is", "odd:"]
        and lines[12][:4] == ["-", "a", "to", "b"]
        and len(lines) == 13
    )


def test_one_worker_has_no_matrix() -> None:
    text = describe_cluster(Topology((HostRanks("a", (0,), "10.0.0.1", 2, (DEVICE,)),)))
    assert (
        text.startswith("1 worker on 1 host")
        and "links" not in text
        and text.endswith("nothing is odd")
    )
