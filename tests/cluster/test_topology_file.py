"""cluster.json there and back, and one line for each file that is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cluster.topology import Device, DeviceSpeed, HostLink, HostRanks, Interface, Topology
from paceline.cluster.topology_file import (
    check_target,
    format_topology,
    parse_topology,
    read_topology,
    write_topology,
)
from paceline.errors import PacelineError, UsageError
from paceline.observe.cluster_report import describe_cluster
from paceline.unequal.probe.cluster_file import ClusterFile
from tests.harness.strangers import made_up

DEVICE = Device(
    "cpu",
    0,
    "some",
    8,
    4,
    2,
    (DeviceSpeed("float32", 1e9, 0.1), DeviceSpeed("bfloat16", 3e9)),
    2e9,
    1.9,
    2e9,
    3e9,
    "performance",
)
HOSTS = (
    HostRanks(
        "a",
        (0, 2),
        "10.0.0.1",
        4,
        (DEVICE, DEVICE),
        1.5,
        "m",
        8,
        (Interface("eth0", "10.0.0.1", "10.0.0.0/24", 1e9),),
    ),
    HostRanks("b", (1,), "10.0.0.2"),
)
MEASURED = Topology(HOSTS, (HostLink(0, 1, 1e-4, 1.25e8, 6e7), HostLink(1, 0, 1e-4, 1.2e8)))


def test_there_and_back(tmp_path: Path) -> None:
    assert parse_topology(format_topology(MEASURED)) == MEASURED
    write_topology(tmp_path / "cluster.json", MEASURED)
    assert read_topology(tmp_path / "cluster.json") == MEASURED
    check_target(tmp_path / "cluster.json")  # may be measured again
    check_target(tmp_path / "new.json")


def changed(**fields: object) -> str:
    return json.dumps({**json.loads(format_topology(MEASURED)), **fields})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", "isn't JSON"),
        ("[]", "isn't a measured cluster"),
        ("{}", "isn't a measured cluster"),
        (changed(version=2), "has version 2, and this paceline reads version 1: measure again"),
        (changed(hosts=None), "is incomplete or damaged"),
        (changed(links=[{"source": 0}]), "is incomplete or damaged .*bytes_per_second"),
        (
            changed(links=[{**json.loads(format_topology(MEASURED))["links"][0], "color": 1}]),
            "is incomplete or damaged .*color",
        ),
    ],
)
def test_what_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_topology(text, "x.json")


def test_places_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}")
    for path, said in (
        (tmp_path / "mine.json", "would replace"),
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "x", "there is no folder"),
    ):
        with pytest.raises(UsageError, match=said):
            check_target(path)
    with pytest.raises(UsageError, match="can't be written"):
        write_topology(tmp_path / "no" / "x.json", MEASURED)
    with pytest.raises(UsageError, match="can't be read"):
        read_topology(tmp_path / "no.json")


def test_a_measured_cluster_that_is_made_up_is_used_or_refused() -> None:
    for text in made_up(json.loads(format_topology(MEASURED)), 1000):
        try:
            found = parse_topology(text)
            describe_cluster(found)
            found.relative_speeds()
            ClusterFile(found, "x.json").check_topology(MEASURED)
            ClusterFile(found, "x.json").route_facts(MEASURED)
        except PacelineError:
            continue
