"""`pl.probe`: a cluster measured by threads and by a job, and what is refused."""

from __future__ import annotations

import pytest
import torch

from paceline.cluster import topology_file
from paceline.cluster.topology import HostLink, HostRanks, Topology
from paceline.comm.group_protocol import Group
from paceline.errors import UsageError
from paceline.session import cluster_probe
from paceline.session.cluster_probe import measure_group
from paceline.unequal.probe.links import LinkFigures
from tests.harness.jobs import Jobs
from tests.harness.thread_groups import spawn

CPU = torch.device("cpu")
CLUSTER = Topology(
    (
        HostRanks("a", (0, 2), "127.0.0.1"),
        HostRanks("b", (1,), "127.0.0.1"),
        HostRanks("c", (3,), "127.0.0.1"),
    )
)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is measured for a moment."""
    for name in (
        "COMPUTING",
        "MOST_COMPUTING",
        "LINKING",
        "LEAST_LINKING",
        "MOST_LINKING",
        "INSIDE",
        "CROWDED",
    ):
        monkeypatch.setattr(cluster_probe, name, 0.005)
    monkeypatch.setattr(cluster_probe.compute, "SHORTEST_PRODUCT", 1e-6)
    monkeypatch.setattr(cluster_probe.compute, "COPIED", 1 << 16)


def test_all_workers_get_the_same_whole_cluster(brief: None) -> None:
    found = spawn(
        4,
        lambda group: measure_group(group, CLUSTER, CPU, ("float32", "float64")),
        hosts=[0, 1, 0, 2],
    )
    assert all(each == found[0] for each in found)
    topology = found[0]
    assert [(host.name, host.ranks, len(host.devices)) for host in topology.hosts] == [
        ("a", (0, 2), 2),
        ("b", (1,), 1),
        ("c", (3,), 1),
    ]
    assert (
        len({host.machine for host in topology.hosts}) == 1 and topology.hosts[0].machine_cores > 0
    )
    for host in topology.hosts:
        for device in host.devices:
            assert (
                device.kind == "cpu"
                and device.threads == torch.get_num_threads()
                and 0 < device.free_bytes <= device.memory_bytes
            )
            assert (
                device.dtype_flops("float32") > 0
                and device.dtype_flops("float64") > 0
                and device.dtype_flops("bfloat16") == 0
            )
            assert device.copied_bytes_per_second > 0 and device.attended > 0
    assert [(link.source, link.target) for link in topology.links] == [
        (a, b) for a in range(3) for b in range(3) if a != b or a == 0
    ]
    assert all(
        link.latency_seconds > 0 and link.bytes_per_second > 0 and link.crowded_bytes_per_second > 0
        for link in topology.links
    )
    assert max(topology.relative_speeds()) == 1 and len(topology.relative_speeds()) == 4
    assert topology_file.parse_topology(topology_file.format_topology(topology)) == topology


def test_one_worker_has_no_links(brief: None) -> None:
    [topology] = spawn(
        1,
        lambda group: measure_group(
            group, Topology((HostRanks("a", (0,), "127.0.0.1"),)), CPU, ("bfloat16",)
        ),
    )
    assert (
        topology.links == ()
        and topology.relative_speeds("bfloat16") == (1.0,)
        and topology.relative_speeds() == ()
    )


def test_links_of_hosts_are_those_of_their_workers() -> None:
    alone = [
        LinkFigures((0, 2), 1e-3, 10.0),
        LinkFigures((2, 0), 3e-3, 30.0),
        LinkFigures((1, 0), 5e-3, 50.0),
    ]
    crowded = [LinkFigures((2, 0), 9.0, 6.0)]
    assert list(cluster_probe._merge_links(CLUSTER, alone, crowded)) == [
        HostLink(0, 0, 2e-3, 20.0, 6.0),
        HostLink(1, 0, 5e-3, 50.0, 0.0),
    ]


def test_workers_that_ask_for_other_dtypes_are_told(brief: None) -> None:
    def body(group: Group) -> str:
        with pytest.raises(UsageError) as told:
            measure_group(group, CLUSTER, CPU, ("float32",) if group.rank != 2 else ("float64",))
        return str(told.value)

    assert set(spawn(4, body)) == {
        (
            "workers ask pl.probe for other dtypes: rank 0 for ['float32'], rank 2 for "
            "['float64']; give all the same"
        )
    }


SCRIPT = """
from paceline.session import cluster_probe
cluster_probe.COMPUTING = 0.1  # seconds: how exact it is doesn't matter here
cluster_probe.INSIDE = cluster_probe.CROWDED = 0.01
cluster_probe.compute.SHORTEST_PRODUCT, cluster_probe.compute.COPIED = 1e-6, 1 << 16
with pl.start(folder="runs") as run:
    model, optimizer, loader = parts(run)
    topology = pl.probe(run, dtypes=["float32"])
    from paceline.cluster import topology_file
    from pathlib import Path
    topology_file.write_topology(Path(f"{run.rank}.json"), topology)
    for x, y in loader:
        if run.steps == 0:
            try:
                pl.probe(run)
            except pl.UsageError as error:
                run.print(f"refused: {error}")
        step(run, model, optimizer, x, y)
"""


def test_a_script_measures_and_goes_on(job: Jobs) -> None:
    ended = job.run(SCRIPT, 2).end()
    assert ended.code == 0, ended.err
    one, other = (topology_file.read_topology(job.folder / f"{rank}.json") for rank in range(2))
    assert (
        one == other and one.size == 2 and len(one.hosts) == 1 and one.find_link(0, 0) is not None
    )
    assert "refused: pl.probe(run) is called inside a loop over a loader" in ended.out


def test_a_worker_that_dies_ends_it_in_a_line(job: Jobs) -> None:
    dying = """
import signal
with pl.start(folder="runs") as run:
    if run.rank == 1:
        from paceline.unequal.probe import compute
        compute.measure_copies = lambda pair, seconds: os.kill(os.getpid(), signal.SIGKILL)
    pl.probe(run)
"""
    ended = job.run(dying, 2).end()
    assert (
        ended.code == 128 + 9 and "rank 1 on" in ended.last and "killed by SIGKILL" in ended.last
    ), ended.err


def test_runs_that_survive_losses_measure_nothing(job: Jobs) -> None:
    ended = job.run(
        'with pl.start(folder="runs") as run:\n    pl.probe(run)\n', 2, "--min-workers", "1"
    ).end()
    assert ended.code != 0 and "--min-workers lets some go: leave it out to measure" in ended.err, (
        ended.err
    )
