"""Counts the bytes that a rank sends, within its host and to other hosts."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.comm.group import Traffic


class TrafficMeter:
    """The traffic of one rank; `hosts` is the host of each rank (None: all on one).

    Native collectives don't tell what they send: they are counted by the algorithm that they are
    known to use.
    """

    def __init__(self, rank: int, size: int, hosts: Sequence[int] | None = None) -> None:
        self.traffic = Traffic()
        self.hosts = tuple(hosts) if hosts is not None else (0,) * size
        self._rank, self._size = rank, size

    def sent(self, to: int, nbytes: int) -> None:
        """Count `nbytes` to rank `to`; what stays in this process is not counted."""
        if to == self._rank:
            return
        if self.hosts[to] == self.hosts[self._rank]:
            self.traffic.within += nbytes
        else:
            self.traffic.between += nbytes

    def everyone(self, nbytes: int) -> None:
        """Count `nbytes` to each of the others."""
        for to in range(self._size):
            self.sent(to, nbytes)

    def ring(self, nbytes: int, *, laps: int = 2) -> None:
        """Count a ring over `nbytes`: (n-1)/n of it go to the next rank in each lap; an
        all-reduce has two, a reduce-scatter one.
        """
        self.sent((self._rank + 1) % self._size, laps * (self._size - 1) * nbytes // self._size)

    def choose(self, ranks: Sequence[int]) -> list[int]:
        """Return the hosts of `ranks`, for a subgroup."""
        return [self.hosts[rank] for rank in ranks]
