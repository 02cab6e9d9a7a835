"""Each rank has a host, however ranks are dealt to hosts."""

from __future__ import annotations

import pytest

from paceline.cluster.topology import HostRanks, Topology

DEALT = Topology((HostRanks("a", (0, 2, 4), "10.0.0.1"), HostRanks("b", (1, 3), "10.0.0.2")))


def test_ranks_find_their_hosts() -> None:
    assert DEALT.size == 5
    assert DEALT.where() == (0, 1, 0, 1, 0)
    assert DEALT.names() == ("a", "b", "a", "b", "a")
    assert [DEALT.of(rank).address for rank in range(5)] == ["10.0.0.1", "10.0.0.2", "10.0.0.1", "10.0.0.2", "10.0.0.1"]


def test_a_part_of_the_workers_is_numbered_anew() -> None:
    assert DEALT.part([1, 4, 2]).hosts == (HostRanks("b", (0,), "10.0.0.2"), HostRanks("a", (1, 2), "10.0.0.1"))
    assert DEALT.part(range(5)) == DEALT


def test_a_rank_that_is_not_there_has_no_host() -> None:
    with pytest.raises(IndexError):
        DEALT.of(5)
