"""A cluster of the lab is measured: what the links carry, who is slow, and one line where it
can't be.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.bench import probe
from paceline.cluster import topology_file
from paceline.lab.hosts import Cluster
from paceline.unequal.probe.oddities import find_oddities

pytestmark = pytest.mark.slow


def test_two_hosts_are_measured_in_both_directions(
    build: Callable[..., Cluster], tmp_path: Path
) -> None:
    built = build(hosts=2, up="20mbit", down="100mbit")
    built.limit(1, up="80mbit", down="100mbit")
    out = tmp_path / "cluster.json"
    for _ in range(3):  # who stands still on a busy machine finds what came meanwhile all at once
        outcome = built.run(
            probe.__file__,
            "--out",
            str(out),
            "--dtypes",
            "float32",
            "--folder",
            str(tmp_path),
            deadline=120,
        )
        assert outcome.code == 0, outcome.output
        topology = topology_file.read_topology(out)
        up, down = topology.find_link(0, 1), topology.find_link(1, 0)
        assert up is not None and down is not None
        rates = 8 * up.bytes_per_second, 8 * down.bytes_per_second
        if as_limited := 0.25 * 20e6 < rates[0] < 1.05 * 20e6 < rates[1] < 1.05 * 80e6:
            break
    assert as_limited, rates
    assert [host.name for host in topology.hosts] == ["host0", "host1"] and topology.hosts[
        0
    ].machine == topology.hosts[1].machine
    assert [each.name for each in topology.hosts[0].interfaces] == ["eth0"] and topology.hosts[
        0
    ].interfaces[0].network == "10.77.0.0/16"
    assert len(topology.relative_speeds()) == 2 and any(
        "are one machine" in line for line in find_oddities(topology)
    ) == (
        # there are no quotas
        topology.hosts[0].machine_cores
        < sum(device.threads for host in topology.hosts for device in host.devices)
    )
    assert f"written to {out}" in outcome.output and "run.prepare" not in outcome.output
