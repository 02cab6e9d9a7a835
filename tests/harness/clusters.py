"""Clusters as a probe would have measured them."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.cluster.topology import HostLink, HostRanks, Topology


def measured(
    rates: Mapping[str, float], workers: int = 1, cores: int = 8, latency: float = 1e-4
) -> Topology:
    """Hosts of these names with as many workers each, whose links carry so many bytes a second."""
    hosts = tuple(
        HostRanks(name, tuple(range(workers * n, workers * (n + 1))), "10.0.0.1", cores)
        for n, name in enumerate(rates)
    )
    speeds = list(rates.values())
    pairs = [(a, b) for a in range(len(speeds)) for b in range(len(speeds)) if a != b]
    return Topology(
        hosts, tuple(HostLink(a, b, latency, min(speeds[a], speeds[b])) for a, b in pairs)
    )
