"""The measured cluster of a run: read, compared with the hosts that are there, and what it says
of their links and cores.
"""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cluster import topology_file
from paceline.cluster.topology import HostLink, HostRanks, Topology
from paceline.errors import UsageError
from paceline.sync.route_choice import RouteFacts
from paceline.unequal.probe.cluster_file import ClusterFile
from tests.harness.clusters import measured
from tests.harness.jobs import PRELUDE, Ended, Jobs, free_port


def present(*workers: tuple[str, int]) -> Topology:
    hosts, first = [], 0
    for name, count in workers:
        hosts.append(HostRanks(name, tuple(range(first, first + count)), "10.0.0.1", 64))
        first += count
    return Topology(tuple(hosts))


CLUSTER = measured({"a": 90e6, "b": 90e6, "c": 10e6}, workers=2, cores=8)


def test_a_file_an_object_and_nothing(tmp_path: Path) -> None:
    topology_file.write_topology(tmp_path / "cluster.json", CLUSTER)
    read, given = (
        ClusterFile.read_cluster(tmp_path / "cluster.json"),
        ClusterFile.read_cluster(CLUSTER),
    )
    assert (
        read is not None
        and given is not None
        and read.topology == CLUSTER
        and read.source == "cluster.json"
    )
    assert (
        read.digest
        == given.digest
        != ClusterFile(replace(CLUSTER, links=CLUSTER.links[1:]), "").digest
    )
    assert ClusterFile.read_cluster(None) is None
    with pytest.raises(UsageError, match="with --min-workers hosts change"):
        ClusterFile.read_cluster(CLUSTER, survives=True)
    with pytest.raises(UsageError, match=r"cluster=3 is no measured cluster"):
        ClusterFile.read_cluster(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"absent.json can't be read .* `paceline probe"):
        ClusterFile.read_cluster("absent.json")


def test_links_and_cores_come_in_the_order_of_the_hosts_that_are_there() -> None:
    file, here = ClusterFile(CLUSTER, "cluster.json"), present(("c", 2), ("a", 2), ("b", 2))
    file.check_topology(here)
    assert file.route_facts(here) == RouteFacts((10e6, 90e6, 90e6), 1e-4, 4.0, "cluster.json")


def test_the_link_of_a_host_is_the_better_of_its_pairs_and_the_worse_of_its_directions() -> None:
    rates = {
        (0, 1): 100.0,
        (1, 0): 90.0,
        (0, 2): 10.0,
        (2, 0): 50.0,
        (1, 2): 10.0,
        (2, 1): 50.0,
        (0, 0): 1e9,
    }
    topology = replace(
        CLUSTER, links=tuple(HostLink(*pair, 1e-4, rate) for pair, rate in rates.items())
    )
    assert ClusterFile(topology, "").route_facts(CLUSTER).rates == (90.0, 90.0, 10.0)


def test_a_quota_and_a_machine_of_several_hosts_leave_fewer_cores() -> None:
    a, b, c = CLUSTER.hosts
    quota = Topology((replace(a, quota=1.0), b, c), CLUSTER.links)
    assert ClusterFile(quota, "").route_facts(CLUSTER).cores == 0.5
    shared = Topology(
        tuple(replace(host, machine="m", machine_cores=8) for host in (a, b, c)), CLUSTER.links
    )
    assert ClusterFile(shared, "").route_facts(CLUSTER).cores == pytest.approx(8 / 6)


@pytest.mark.parametrize(
    ("here", "words"),
    [
        (
            present(("a", 2), ("b", 2)),
            (
                r"this job has a \(2 workers\), b \(2 workers\): measure it again with `paceline "
                r"probe`"
            ),
        ),
        (
            present(("a", 2), ("b", 2), ("d", 2)),
            (
                r"was measured on a \(2 workers\), b \(2 workers\), c \(2 workers\), and this job "
                r"has .*d"
            ),
        ),
        (present(("a", 2), ("b", 2), ("c", 1)), r"this job has .*c \(1 worker\): measure it again"),
        (
            present(*((f"h{n}", 1) for n in range(20))),
            r"h7 \(1 worker\) and 12 more: measure it again",
        ),
    ],
)
def test_other_hosts_or_workers_are_refused_in_a_line(here: Topology, words: str) -> None:
    with pytest.raises(UsageError, match=words) as error:
        ClusterFile(CLUSTER, "cluster.json").check_topology(here)
    assert "\n" not in str(error.value)


def test_a_host_without_a_link_is_refused_and_one_alone_needs_none() -> None:
    with pytest.raises(
        UsageError, match=r"cluster.json has no measured link of c to another host: measure again"
    ):
        ClusterFile(
            replace(
                CLUSTER,
                links=tuple(link for link in CLUSTER.links if 2 not in (link.source, link.target)),
            ),
            "cluster.json",
        ).check_topology(CLUSTER)
    one = present(("a", 2))
    ClusterFile(one, "").check_topology(one)
    assert ClusterFile(one, "").route_facts(one).cores == 32


TRAINING = """
with pl.start(folder="runs", name="run") as run:
    model, optimizer, loader = parts(run, samples=32)
    for x, y in loader:
        step(run, model, optimizer, x, y)
    sums = run.group.gather_objects([p.double().sum().item() for p in model.parameters()], name="sums")
    assert all(each == sums[0] for each in sums), sums
"""  # noqa: E501


def test_two_hosts_with_one_file_take_its_way_and_with_two_files_neither_starts(job: Jobs) -> None:
    """Hosts of one machine have numbers behind its name."""
    hosts = [f"{socket.gethostname()}#{number}" for number in range(2)]
    for name, rate in (("fast", 1e9), ("faster", 2e9)):
        topology_file.write_topology(
            job.folder / f"{name}.json", measured(dict.fromkeys(hosts, rate), workers=2, cores=2)
        )

    def launched(*names: str) -> list[Ended]:
        meeting = ("--hosts", "2", "--join", f"127.0.0.1:{free_port()}")
        environ = {"PACELINE_SECRET": "5a" * 32, "PACELINE_INTERFACE": "lo"}
        come = [
            job.run(PRELUDE + TRAINING, 2, *meeting, "--cluster", f"{name}.json", **environ)
            for name in names
        ]
        return [each.end() for each in come]

    ended = launched("fast", "fast")
    assert not any(each.code for each in ended), ended
    route = json.loads((job.folder / "runs" / "run" / "summary.json").read_text())["route"]
    assert (
        route["way"] == "native"
        and "links carry 8 Gbit/s, with 1 cores for each worker (fast.json)" in route["why"]
    )
    assert sum(each.err.count(route["why"]) for each in ended) == 1, "it is said once"

    apart = launched("fast", "faster")
    assert all(each.code for each in apart) and all(
        "given different measured clusters" in each.err for each in apart
    ), apart


def test_a_file_of_other_hosts_ends_a_job_with_one_line(job: Jobs) -> None:
    topology_file.write_topology(job.folder / "cluster.json", measured({"a": 1e8, "b": 1e8}))
    ended = job.run(PRELUDE + TRAINING.replace("name=", "cluster='cluster.json', name="), 2).end()
    assert (
        ended.code
        and "cluster.json was measured on a (1 worker), b (1 worker), and this job has"
        in ended.said
    )
    assert ended.said.endswith("measure it again with `paceline probe`")
