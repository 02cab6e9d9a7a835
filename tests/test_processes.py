"""The loss curve belongs to the script: real processes under every launcher, against a plain
loop, and beside torch.distributed.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys

import pytest

from paceline.comm.schedule import SCHEDULES
from tests.harness.curves import Case, check
from tests.harness.jobs import ROOT, Ended, Job, Jobs, free_port, wait_for

CURVES = str(ROOT / "tests" / "harness" / "curves.py")
LIMITS = {"sgd": 1e-5, "adam": 1e-9}


def ask(job: Jobs, **cases: Case) -> str:
    """The file of these cases."""
    path = job.folder / "cases.json"
    path.write_text(json.dumps(cases))
    return str(path)


def launch(job: Jobs, size: int, **cases: Case) -> Ended:
    """All these cases under `paceline run`, in one job."""
    command = [
        sys.executable,
        *job.launcher,
        "run",
        "--workers",
        str(size),
        CURVES,
        ask(job, **cases),
    ]
    ended = job.start(command).end()
    assert ended.code == 0, ended.err
    return ended


def same(job: Jobs, size: int, **cases: Case) -> None:
    """Every case ends with the plain loop's weights."""
    far = {}
    for name, case in cases.items():
        distance = check(case, name, job.folder, size)
        if distance > LIMITS[case.optimizer]:
            far[name] = distance
    assert not far


class TestTheCurve:
    def test_of_two_workers(self, job):
        cases = {
            "equal": Case(),
            "adam": Case(optimizer="adam"),
            "uneven": Case(shares=[1, 7], optimizer="adam"),
            "empty": Case(shares=[0, 8]),
            "norm": Case(shares=[1, 7], norm=True),
            "native": Case("native", [1, 7]),
            **{name.replace("-", "_"): Case(name, [1, 7]) for name in SCHEDULES},
        }
        launch(job, 2, **cases)
        same(job, 2, **cases)

    @pytest.mark.slow
    def test_of_one_worker(self, job):
        cases = {"sgd": Case(), "adam": Case(optimizer="adam"), "ring": Case("ring")}
        launch(job, 1, **cases)
        same(job, 1, **cases)
        assert check(cases["sgd"], "sgd", job.folder, 1) == 0

    @pytest.mark.slow
    @pytest.mark.alike(1)
    @pytest.mark.parametrize("size", [3, 4])
    def test_of_more_workers_than_cores(self, job, size):
        shares = {3: [3, 3, 2], 4: [4, 0, 3, 1]}[size]
        cases = {
            "equal": Case(),
            "adam": Case(optimizer="adam"),
            "uneven": Case(shares=shares, optimizer="adam"),
            "native": Case("native", shares),
            **{
                name.replace("-", "_"): Case(name, shares)
                for name in (SCHEDULES if size == 3 else ("halving-doubling",))
            },
        }
        launch(job, size, **cases)
        same(job, size, **cases)

    @pytest.mark.slow
    def test_mutants_fail(self, job):
        """The checks above would see them."""
        cases = {
            "unweighted": Case(shares=[1, 7], mutant="averages without weights"),
            "silent": Case(mutant="doesn't communicate"),
        }
        launch(job, 2, **cases)
        for name, case in cases.items():
            assert check(case, name, job.folder, 2) > 1e-3


class TestLaunchers:
    """The same script wherever it is started."""

    CASE = Case(shares=None, optimizer="adam")

    def ends_well(self, job: Jobs, started: list[Job], size: int) -> None:
        for ended in [one.end() for one in started]:
            assert ended.code == 0, ended.err
        same(job, size, case=self.CASE)

    def test_alone(self, job):
        self.ends_well(job, [job.start([sys.executable, CURVES, ask(job, case=self.CASE)])], 1)

    @pytest.mark.slow
    def test_open_mpi(self, job):
        mpirun = shutil.which("mpirun")
        if mpirun is None:
            pytest.skip("no mpirun here: install Open MPI")
        options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2"]
        self.ends_well(
            job,
            [job.start([mpirun, *options, sys.executable, CURVES, ask(job, case=self.CASE)])],
            2,
        )

    @pytest.mark.slow
    def test_slurm(self, job):
        """srun's variables, set by hand."""
        path = ask(job, case=self.CASE)
        step = {
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NUM_NODES": "1",
        }
        nodes = {
            "SLURM_STEP_NODELIST": socket.gethostname(),
            "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURM_NODEID": "0",
        }
        places = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
        self.ends_well(
            job,
            [
                job.start([sys.executable, CURVES, path], **step, **nodes, **place)
                for place in places
            ],
            2,
        )


OWN = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
model = DistributedDataParallel(nn.Linear(4, 1))
model(torch.randn(8, 4)).sum().backward()
grads = [torch.empty_like(model.module.weight.grad) for _ in range(size)]
dist.all_gather(grads, model.module.weight.grad)
assert all(torch.equal(grad, grads[0]) for grad in grads)
there = "paceline.session.run" in sys.modules
print("ddp", size, os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], os.environ["GROUP_RANK"], there)
sys.stdout.flush()
os._exit(0)  # DDP's Gloo threads abort one interpreter in ten as it ends, under torchrun too, whatever is destroyed before
"""  # noqa: E501
BOTH = """
import torch.distributed as dist
first = sys.argv[1] == "torch"
if first:
    dist.init_process_group("gloo")
with pl.start() as run:
    assert dist.is_initialized()  # the script's own, or else one of the run's
    model, optimizer, loader = parts(run)
    for x, y in loader:
        step(run, model, optimizer, x, y)
        number = torch.tensor([run.rank + 1.0])
        dist.all_reduce(number)
        assert number == 3
    try:
        run.prepare(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))
    except pl.UsageError as error:
        refused = "wrapped in DistributedDataParallel already" in str(error)
assert dist.is_initialized() == first
if first:
    dist.destroy_process_group()
print(f"both {run.steps} {refused}\\n", end="")  # in one piece: torchrun does not keep lines apart
"""


class TestTorchDistributed:
    @pytest.mark.slow
    @pytest.mark.real_processes
    def test_a_script_that_never_heard_of_paceline(self, job):
        ended = job.run(OWN).end()
        assert ended.code == 0, ended.err
        assert sorted(ended.out.splitlines()) == [
            f"[{rank}] ddp 2 {rank} 2 0 False" for rank in range(2)
        ]

    @pytest.mark.slow
    def test_a_script_that_uses_both(self, job):
        ended = job.run(BOTH, args=("torch",)).end()
        assert ended.code == 0, ended.err
        assert sorted(ended.out.splitlines()) == ["[0] both 8 True", "[1] both 8 True"]

    @pytest.mark.slow
    def test_under_torchrun(self, job):
        """The curve is the same as anywhere, and then the script uses torch.distributed too."""
        script = job.write(
            f"from tests.harness import curves\ncurves.main()\nsys.argv[1] = 'paceline'\n{BOTH}"
        )
        case = TestLaunchers.CASE
        command = [
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--master-port",
            str(free_port()),
            script,
            ask(job, case=case),
        ]
        ended = job.start([sys.executable, "-m", *command]).end()
        assert ended.code == 0, ended.err
        assert ended.out.count("both 8 True") == 2
        same(job, 2, case=case)


LONG = """
from pathlib import Path
with pl.start() as run:
    model, optimizer, loader = parts(run, samples=10**5)
    for x, y in loader:
        {inside}
        step(run, model, optimizer, x, y)
"""


class TestTwoHosts:
    """Two launchers on this machine that meet as two hosts, with two workers and one."""

    def launch(self, job: Jobs, script: str, *args: str) -> list[Job]:
        common = [
            sys.executable,
            *job.launcher,
            "run",
            "--hosts",
            "2",
            "--join",
            f"127.0.0.1:{free_port()}",
        ]
        return [
            job.start(
                [*common, "--host-rank", str(host), "--workers", str(workers), script, *args],
                PACELINE_SECRET="0123456789abcdef" * 2,
            )
            for host, workers in enumerate([2, 1])
        ]

    @pytest.mark.slow
    def test_the_curve_and_the_bytes(self, job):
        cases = {
            "equal": Case(),
            "adam": Case(shares=[3, 3, 2], optimizer="adam"),
            "native": Case("native", [3, 3, 2]),
            **{name.replace("-", "_"): Case(name, [0, 5, 3]) for name in SCHEDULES},
        }
        for ended in [one.end() for one in self.launch(job, CURVES, ask(job, **cases))]:
            assert ended.code == 0, ended.err
        same(job, 3, **cases)
        nbytes = 4 * (8 * 16 + 16 + 16 * 3 + 3)  # of the gradients of a step
        for name in cases:
            summary = json.loads((job.folder / "runs" / name / "summary.json").read_text())
            assert summary["hosts"] == 2 and summary["workers"] == 3
            sent = summary["bytes_sent"]
            assert sent["within"] > 0 and nbytes <= sent["between"], (name, sent)
        # one copy per host: two leaders send each other what amounts to one copy each
        summary = json.loads((job.folder / "runs" / "equal" / "summary.json").read_text())
        assert summary["bytes_sent"]["between"] <= 2.2 * nbytes

    @pytest.mark.slow
    @pytest.mark.parametrize("pause", [0, 0.8], ids=["at once", "slow to say why"])
    def test_both_launchers_name_the_one_that_failed(self, job, pause):
        slow = (
            "said = sys.excepthook\ndef "
            f"slowly(*error):\n    time.sleep({pause})\n    said(*error)\nsys.excepthook = slowly\n"
        )
        script = job.write(
            slow + LONG.format(inside="if rank == 2 and run.steps == 5: raise ValueError('boom')")
        )
        for ended in [one.end() for one in self.launch(job, script)]:
            assert (
                ended.code == 1 and ended.said == "ValueError: boom" and "rank 2 on" in ended.last
            ), ended.err

    @pytest.mark.slow
    def test_a_launcher_that_is_killed_ends_both_hosts(self, job):
        script = job.write(LONG.format(inside="if run.steps == 5: Path(f'ready{rank}').touch()"))
        first, second = self.launch(job, script)
        wait_for(lambda: all((job.folder / f"ready{rank}").exists() for rank in range(3)), 60)
        second.process.kill()
        second.end()
        ended = first.end()
        assert ended.code != 0 and ended.last.startswith("paceline: "), ended.err
