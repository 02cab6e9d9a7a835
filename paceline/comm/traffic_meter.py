"""Counts the bytes that a rank sends, within its host and to other hosts."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.comm.group_protocol import Traffic


class TrafficMeter:
    """The traffic of one rank.

    Native collectives don't report what they send, so they are counted by the algorithm that they
    are known to use.

    Args:
        rank: This rank.
        size: Number of ranks.
        hosts: Host of each rank. Default: all on one.
    """

    def __init__(self, rank: int, size: int, hosts: Sequence[int] | None = None) -> None:
        self.traffic = Traffic()
        self.hosts = tuple(hosts) if hosts is not None else (0,) * size
        self._rank, self._size = rank, size

    def count_sent(self, to: int, nbytes: int) -> None:
        """Count `nbytes` sent to rank `to`. Nothing is counted for this rank itself."""
        if to == self._rank:
            return
        if self.hosts[to] == self.hosts[self._rank]:
            self.traffic.within += nbytes
        else:
            self.traffic.between += nbytes

    def count_to_all(self, nbytes: int) -> None:
        """Count `nbytes` sent to each of the other ranks."""
        for to in range(self._size):
            self.count_sent(to, nbytes)

    def count_ring(self, nbytes: int, *, laps: int = 2) -> None:
        """Count a ring over a tensor of `nbytes`: (n-1)/n of it go to the next rank in each lap.

        An all-reduce has two laps, a reduce-scatter one.
        """
        self.count_sent(
            (self._rank + 1) % self._size, laps * (self._size - 1) * nbytes // self._size
        )

    def select_hosts(self, ranks: Sequence[int]) -> list[int]:
        """List the hosts of `ranks`, for a subgroup."""
        return [self.hosts[rank] for rank in ranks]
