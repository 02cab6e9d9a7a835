"""Each rank has a host, however ranks are dealt to hosts."""

from __future__ import annotations

import pytest

from paceline.cluster.topology import Device, DeviceSpeed, HostLink, HostRanks, Topology

DEALT = Topology((HostRanks("a", (0, 2, 4), "10.0.0.1"), HostRanks("b", (1, 3), "10.0.0.2")))


def test_ranks_find_their_hosts() -> None:
    assert DEALT.size == 5
    assert DEALT.host_by_rank() == (0, 1, 0, 1, 0)
    assert DEALT.host_names() == ("a", "b", "a", "b", "a")
    assert [DEALT.host_of(rank).address for rank in range(5)] == [
        "10.0.0.1",
        "10.0.0.2",
        "10.0.0.1",
        "10.0.0.2",
        "10.0.0.1",
    ]


def test_a_part_of_the_workers_is_numbered_anew() -> None:
    assert DEALT.select_ranks([1, 4, 2]).hosts == (
        HostRanks("b", (0,), "10.0.0.2"),
        HostRanks("a", (1, 2), "10.0.0.1"),
    )
    assert DEALT.select_ranks(range(5)) == DEALT


def test_a_rank_that_is_not_there_has_no_host() -> None:
    with pytest.raises(IndexError):
        DEALT.host_of(5)


def test_what_was_measured_is_found_by_rank_and_host() -> None:
    fast, slow = (Device("cpu", speeds=(DeviceSpeed("float32", flops),)) for flops in (4e10, 1e10))
    link = HostLink(0, 1, 1e-4, 1e8)
    measured = Topology(
        (
            HostRanks("a", (0, 2), "10.0.0.1", 2, (fast, slow)),
            HostRanks("b", (1,), "10.0.0.2", 1, (slow,)),
        ),
        (link,),
    )
    assert measured.device_of(2) is slow and measured.device_of(0) is fast
    assert (
        measured.relative_speeds() == (1.0, 0.25, 0.25)
        and measured.relative_speeds("float64") == ()
    )
    assert measured.find_link(0, 1) is link and measured.find_link(1, 0) is None
    assert (
        DEALT.device_of(0) is None
        and DEALT.relative_speeds() == ()
        and Topology(()).relative_speeds() == ()
    )
