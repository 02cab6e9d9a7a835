"""What a user gives `paceline plan` and `paceline run --plan`, and how mistakes are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cluster.launcher.request import LaunchRequest
from paceline.cluster.topology import Device, DeviceSpeed, HostLink, HostRanks, Topology
from paceline.cluster.topology_file import format_topology
from paceline.commands.planned_run import follow_plan
from paceline.errors import UsageError
from paceline.planner.plan_file import PlanFile, write_plan
from paceline.planner.planning.planned_input import apply_changes, choose_cluster, parse_memory

PLAN = PlanFile(
    "train.py", "two.toml", 2, (2, 2), "LocalSGD(every=8)", "", "", "", "local SGD", 0.1, 0.1
)


def write_topology(path: Path, kind: str = "cpu") -> Path:
    device = Device(kind, threads=2, speeds=(DeviceSpeed("float32", 2e10),))
    hosts = tuple(
        HostRanks(name, (rank,), "10.0.0.1", 4, (device,), None, name, 4)
        for rank, name in enumerate("ab")
    )
    links = tuple(
        HostLink(source, 1 - source, 1e-4, 1e8, rate) for source, rate in ((0, 9e7), (1, 5e7))
    )
    path.write_text(format_topology(Topology(hosts, links)))
    return path


def test_a_measured_cluster(tmp_path: Path) -> None:
    cluster = choose_cluster(None, str(write_topology(tmp_path / "cluster.json")))
    first, second = cluster.hosts
    assert (first.threads, first.cores, first.flops) == (2, 4.0, (2e10,))
    assert first.up.bytes_per_second == second.down.bytes_per_second == 9e7
    assert first.down.bytes_per_second == second.up.bytes_per_second == 5e7


def test_a_described_cluster(tmp_path: Path) -> None:
    path = tmp_path / "boxes.toml"
    path.write_text(
        '[all]\nbandwidth = "1gbit"\nprocessors = 8\n[[host]]\nworkers = 2\n'
        '[[host]]\nprocessors = 0.5\nup = "100mbit"\ndelay = "5ms"\n'
    )
    first, second = choose_cluster(None, str(path)).hosts
    assert (first.workers, first.threads, first.cores, first.quota) == (2, 4, 8.0, None)
    assert (second.threads, second.cores, second.quota) == (1, 1.0, 0.5)
    assert first.up.bytes_per_second / second.up.bytes_per_second == pytest.approx(10)
    assert second.up.latency_seconds > 0.005


def test_ready_clusters_are_known_by_name() -> None:
    assert choose_cluster(None, "two-hosts").workers == 4


def test_changes() -> None:
    cluster = choose_cluster(None, "two-hosts")
    changed = apply_changes(cluster, ["link=10gbit", "hosts=4", "workers=1"])
    assert [host.workers for host in changed.hosts] == [1, 1, 1, 1]
    ratio = changed.hosts[3].up.bytes_per_second / cluster.hosts[0].up.bytes_per_second
    assert ratio == pytest.approx(10)
    assert len(apply_changes(cluster, ["hosts=1"]).hosts) == 1


def test_memory() -> None:
    assert parse_memory(None) is None
    assert parse_memory("8GB") == 8e9 and parse_memory("1.5GiB") == 1.5 * 2**30


@pytest.mark.parametrize("text", ["8", "GB", "-1GB", "0GB", "1e3GB", "8 gb"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--memory"):
        parse_memory(text)


def test_wrong_clusters(tmp_path: Path) -> None:
    for workers, cluster, words in (
        (None, None, "either --workers N"),
        (2, "two-hosts", "either --workers N"),
        (0, None, "from 1 to 1000"),
        (None, "nowhere", "there is no ready-made cluster nowhere"),
        (None, "racks", "has racks"),
        (None, str(tmp_path / "none.json"), "none.json"),
        (None, str(write_topology(tmp_path / "gpu.json", "cuda")), "for CPUs"),
    ):
        with pytest.raises(UsageError, match=words):
            choose_cluster(workers, cluster)


WRONG = ["link", "speed=2", "hosts=0", "hosts=x", "link=fast", "workers=1.5"]


@pytest.mark.parametrize("change", WRONG)
def test_wrong_changes(change: str) -> None:
    with pytest.raises(UsageError, match=r"--what-if|bandwidth|link"):
        apply_changes(choose_cluster(None, "two-hosts"), [change])


def test_a_run_follows_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    write_plan(path, PLAN)
    request = follow_plan(LaunchRequest("train.py", hosts=2), path, None)
    assert (request.workers, request.sync, request.shares) == (2, "LocalSGD(every=8)", None)
    assert request.plan == path


@pytest.mark.parametrize(
    ("request_", "workers", "words"),
    [
        (LaunchRequest("train.py"), None, "is for 2 hosts: say --hosts 2"),
        (LaunchRequest("train.py", hosts=2), 3, "--workers 3 contradicts"),
        (LaunchRequest("train.py", hosts=2, sync="Gossip()"), None, "--sync .* contradicts"),
        (LaunchRequest("train.py", hosts=2, shares="auto"), None, "--shares auto contradicts"),
        (LaunchRequest("train.py", hosts=2, host_rank=2), None, "has 2 hosts"),
    ],
)
def test_a_run_that_contradicts_its_plan(
    tmp_path: Path, request_: LaunchRequest, workers: int | None, words: str
) -> None:
    path = tmp_path / "plan.toml"
    write_plan(path, PLAN)
    with pytest.raises(UsageError, match=words):
        follow_plan(request_, path, workers)


def test_hosts_with_different_workers_need_their_ranks(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    write_plan(path, PlanFile("t.py", "c", 2, (1, 3), "", "", "", "", "data parallel", 0.1, 0.1))
    with pytest.raises(UsageError, match="--host-rank"):
        follow_plan(LaunchRequest("t.py", hosts=2), path, None)
    assert follow_plan(LaunchRequest("t.py", hosts=2, host_rank=1), path, None).workers == 3
