"""Each launcher is recognised by what it leaves in the environment, and what makes no sense is
named.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.cluster import secret
from paceline.cluster.discover import JobStart, Place, derive_port, discover_place
from paceline.cluster.machine import count_cores, read_cpu_quota
from paceline.errors import PlaceError, SecretError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "6",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "2",
    "GROUP_WORLD_SIZE": "3",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "1",
}
SLURM = {
    "SLURM_PROCID": "4",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[08-10]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_JOB_ID": "77",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-a-17@1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def stands(place: Place) -> tuple[str, int, int, int, int, int | None, int]:
    return (
        place.launcher,
        place.rank,
        place.size,
        place.local_rank,
        place.local_size,
        place.host_rank,
        place.hosts,
    )


def test_alone():
    place = discover_place({})
    assert stands(place) == ("alone", 0, 1, 0, 1, 0, 1)
    assert place.meeting is None and place.secret is None and place.hostname and not place.bar
    assert (
        discover_place({"TERM": "xterm"}).bar
        and not discover_place({"TERM": "xterm", "CI": "1"}).bar
        and not discover_place({"TERM": "dumb"}).bar
    )
    assert (
        discover_place({"TERM": "xterm"}).breaks
        and not discover_place({"TERM": "xterm", "XTERM_VERSION": "XTerm(372)"}).breaks
    )


def test_torchrun():
    place = discover_place(TORCHRUN)
    assert stands(place) == ("torchrun", 5, 6, 1, 2, 2, 3)
    assert place.meeting == ("node0", 29500) and place.agent_store and place.attempt == 1
    assert not discover_place(TORCHRUN | {"TERM": "xterm"}).bar  # others write to the same terminal


def test_torchrun_without_its_store_and_without_local_variables():
    place = discover_place({"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert stands(place) == ("torchrun", 1, 3, 0, 1, 1, 3)
    assert not place.agent_store


def test_slurm():
    place = discover_place(SLURM)
    assert stands(place) == ("slurm", 4, 5, 0, 1, 2, 3)
    assert place.meeting == ("node08", derive_port("slurm", "77", "0"))
    assert discover_place(SLURM | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}).local_size == 2
    assert discover_place(SLURM | {"MASTER_ADDR": "x", "MASTER_PORT": "9"}).meeting == ("x", 9)


def test_slurm_on_one_host_meets_on_loopback():
    place = discover_place(
        SLURM
        | {
            "SLURM_NODEID": "0",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_STEP_TASKS_PER_NODE": "5",
            "SLURM_LOCALID": "4",
        }
    )
    assert place.hosts == 1 and place.local_size == 5
    assert place.meeting is not None and place.meeting[0] == "127.0.0.1"


def test_a_slurm_batch_script_is_no_task():
    assert (
        discover_place({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}).launcher
        == "alone"
    )


def test_openmpi():
    place = discover_place(OPENMPI)
    assert stands(place) == ("openmpi", 1, 2, 1, 2, 0, 1)
    assert place.meeting == ("127.0.0.1", derive_port("openmpi", "prterun-a-17@1"))


@pytest.mark.parametrize("mpi", [OPENMPI, MPICH])
def test_mpirun_inside_slurm_is_mpi(mpi):
    """mpirun starts its deputies with srun: all ranks of a host see the deputy's SLURM_PROCID."""
    assert discover_place(SLURM | mpi).launcher in {"openmpi", "mpich"}


def test_srun_with_pmi_is_slurm():
    assert discover_place(SLURM | {"PMI_RANK": "4", "PMI_SIZE": "5"}).launcher == "slurm"


def test_mpich_derives_its_port_from_the_parent():
    place = discover_place(MPICH)
    assert stands(place) == ("mpich", 1, 2, 1, 2, 0, 1)
    assert place.meeting == ("127.0.0.1", derive_port("mpich", os.getppid()))


def test_pmi():
    assert stands(discover_place({"PMI_RANK": "0", "PMI_SIZE": "1"})) == ("pmi", 0, 1, 0, 1, 0, 1)
    with pytest.raises(PlaceError, match="PMI_LOCAL_RANK and PMI_LOCAL_SIZE"):
        discover_place({"PMI_RANK": "0", "PMI_SIZE": "2"})


def test_mpi_on_several_hosts_needs_an_address():
    spread = OPENMPI | {"OMPI_COMM_WORLD_SIZE": "4"}
    with pytest.raises(PlaceError, match="set MASTER_ADDR"):
        discover_place(spread)
    with pytest.raises(PlaceError, match="MASTER_PORT isn't set"):
        discover_place(spread | {"MASTER_ADDR": "a"})
    place = discover_place(spread | {"MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert place.meeting == ("a", 1) and place.hosts == 2 and place.host_rank is None


def test_paceline_comes_first():
    descriptor = secret.write_secret_descriptor(b"0123456789abcdef")
    try:
        place = discover_place(
            SLURM
            | TORCHRUN
            | {
                "PACELINE_STORE": "10.0.0.1:1234",
                "PACELINE_STORE_FD": "7",
                "PACELINE_REPORT_FD": "8",
                "PACELINE_ONE_MACHINE": "1",
            }
            | {"PACELINE_SECRET_FD": str(descriptor)}
        )
        assert (
            discover_place(
                {**TORCHRUN, "PACELINE_STORE": "a:1", "PACELINE_SECRET_FD": str(descriptor)}
            ).secret
            == b"0123456789abcdef"
        )
    finally:
        os.close(descriptor)
    assert stands(place) == ("paceline", 5, 6, 1, 2, 2, 3)
    assert place.meeting == ("10.0.0.1", 1234) and (place.store_fd, place.report_fd) == (7, 8)
    assert place.secret == b"0123456789abcdef" and place.one_machine and not place.agent_store


def test_which_start_of_its_job_it_is():
    ours = {**TORCHRUN, "PACELINE_STORE": "a:1"}
    start = JobStart("runs/x", 3, 1.5, ((2.0, "rank 1 was killed"),))
    assert discover_place({**ours, "PACELINE_JOB_START": start.dump()}).job_start == start
    assert (
        discover_place({**ours, "PACELINE_JOB_START": ""}).job_start is None
        and discover_place(ours).job_start is None
    )
    # it was started by another launcher
    assert discover_place({**TORCHRUN, "PACELINE_JOB_START": start.dump()}).job_start is None


def test_what_a_user_sets():
    place = discover_place(
        {
            "PACELINE_SECRET": " 0123456789abcdef\n",
            "PACELINE_NAME": "n",
            "PACELINE_SYNC": "AllReduce()",
            "PACELINE_MESH": "data, tensor=2",
            "PACELINE_CUT": "shard()",
            "PACELINE_SHARES": "auto",
            "PACELINE_CLUSTER": "/x/cluster.json",
            "PACELINE_INTERFACE": "eth0",
            "PACELINE_DEADLINE": "2.5",
            "PACELINE_SERVERS": "3",
        }
    )
    assert place.servers == 3 and discover_place({}).servers is None
    assert place.secret == b"0123456789abcdef"
    assert (place.run_name, place.sync, place.interface, place.deadline) == (
        "n",
        "AllReduce()",
        "eth0",
        2.5,
    )
    assert (place.shares, discover_place({}).shares) == ("auto", None)
    assert (place.cluster, discover_place({"PACELINE_CLUSTER": ""}).cluster) == (
        "/x/cluster.json",
        None,
    )
    assert (place.mesh, place.cut) == ("data, tensor=2", "shard()") and (
        discover_place({}).mesh,
        discover_place({}).cut,
    ) == (None, None)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            {"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "RANK=x isn't a whole number",
        ),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "rank 2, of 2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_ADDR not"),
        ({"WORLD_SIZE": "4"}, "RANK isn't"),
        ({"RANK": "3"}, "WORLD_SIZE isn't"),
        ({"PACELINE_DEADLINE": "-1"}, "PACELINE_DEADLINE=-1"),
        ({"PACELINE_SERVERS": "0"}, "PACELINE_SERVERS is 0"),
        ({"PACELINE_SERVERS": "two"}, "PACELINE_SERVERS=two isn't a whole number"),
        ({"PACELINE_STORE": "a:1", "RANK": "0"}, "WORLD_SIZE isn't set"),
        ({**SLURM, "SLURM_STEP_NODELIST": "a[x]"}, "can't be read"),
    ],
)
def test_what_makes_no_sense_is_named(environ, words):
    with pytest.raises(PlaceError, match=words):
        discover_place(environ)


def test_a_short_secret_is_refused():
    with pytest.raises(SecretError, match=r"token_hex"):
        discover_place({"PACELINE_SECRET": "short"})


def test_a_secret_that_is_not_inherited_is_explained():
    with pytest.raises(SecretError, match="started by a worker"):
        discover_place(TORCHRUN | {"PACELINE_STORE": "a:1", "PACELINE_SECRET_FD": "9999"})


def test_fixed_ports_stay_below_the_ephemeral_range():
    assert all(20_000 <= derive_port("job", number) < 32_000 for number in range(200))
    assert derive_port("a", 1) == derive_port("a", 1) != derive_port("a", 2)


class TestCores:
    def groups(self, tmp_path: Path, line: str, files: dict[str, str]) -> tuple[Path, Path]:
        proc = tmp_path / "cgroup"
        proc.write_text(line)
        for name, text in files.items():
            path = tmp_path / "mount" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return proc, tmp_path / "mount"

    def test_the_smallest_enclosing_quota_counts(self, tmp_path):
        where = self.groups(
            tmp_path,
            "0::/a/b\n",
            {
                "a/b/cpu.max": "max 100000\n",
                "a/cpu.max": "150000 100000\n",
                "cpu.max": "400000 100000",
            },
        )
        assert read_cpu_quota(*where) == 1.5
        assert count_cores(*where) == min(2, len(os.sched_getaffinity(0)))

    def test_version_1(self, tmp_path):
        files = {
            "cpu,cpuacct/x/cpu.cfs_quota_us": "50000",
            "cpu,cpuacct/x/cpu.cfs_period_us": "100000",
            "cpu,cpuacct/cpu.cfs_quota_us": "-1",
        }
        where = self.groups(tmp_path, "3:cpu,cpuacct:/x\n1:memory:/y\n", files)
        assert read_cpu_quota(*where) == 0.5
        assert count_cores(*where) == 1

    def test_no_quota(self, tmp_path):
        where = self.groups(tmp_path, "0::/\n", {"cpu.max": "max 100000"})
        assert read_cpu_quota(*where) is None
        assert count_cores(*where) == len(os.sched_getaffinity(0))
        assert read_cpu_quota(tmp_path / "absent", tmp_path) is None
