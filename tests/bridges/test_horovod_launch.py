"""Whole jobs of scripts for Horovod: `paceline run --horovod`, `horovodrun`, and real deaths."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.bridges.horovod.horovodrun import make_request, run
from paceline.cluster.launcher.request import LaunchRequest, check_request
from paceline.errors import UsageError
from tests.harness.jobs import ROOT, Jobs, free_port, jobs

EXAMPLE = ROOT / "examples" / "bridges" / "horovod_script.py"
BEFORE = ROOT / "examples" / "migrations" / "horovod_before.py"
KILLED = """
import signal
import horovod.torch as hvd
from horovod.torch.mpi_ops import Sum

hvd.init()
torch.manual_seed(0)
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
victim = hvd.size() == 3 and hvd.rank() == 1 and os.environ.get("PACELINE_JOINING") != "1"

@hvd.elastic.run
def train(state):
    print(f"from {state.step} with {hvd.size()}", flush=True)
    while state.step < 20 or (RESTARTED and hvd.size() < 3):
        if victim and state.step == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        state.step += 1
        if state.step % 5 == 0:
            state.commit()
            time.sleep(0.05)

state = hvd.elastic.TorchState(model, optimizer, step=0)
state.register_reset_callbacks([lambda: print(f"now {hvd.size()}", flush=True)])
train(state)
hvd.allreduce(torch.ones(1))
assert len({tuple(w) for w in hvd.allgather_object(model.weight.detach().view(-1).tolist())}) == 1
print(f"ended with {hvd.size()}", flush=True)
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Jobs]:
    with jobs(tmp_path) as found:
        yield found


def test_the_example(job: Jobs) -> None:
    ended = job.run(EXAMPLE.read_text(), 2, "--horovod").end()
    assert ended.code == 0, ended.err
    match = re.search(r"2 processes: accuracy (\d\.\d+)", ended.out)
    assert match is not None and float(match[1]) > 0.9


def test_the_script_of_the_migration_runs_unchanged(job: Jobs) -> None:
    ended = job.run(BEFORE.read_text(), 2, "--horovod").end()
    assert ended.code == 0, ended.err
    assert "epoch 2: accuracy 0.9" in ended.out


def test_the_rank_that_raises_is_named(job: Jobs) -> None:
    body = """
import horovod.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(2), name="x")
if hvd.rank() == 1:
    raise ValueError("a mistake of its own")
hvd.allreduce(torch.ones(2), name="x")
"""
    ended = job.run(body, 2, "--horovod").end()
    assert ended.code == 1
    assert "rank 1 on" in ended.err.splitlines()[-1] and "(ValueError)" in ended.err, ended.err


TRAINED = """
import horovod.torch as hvd
hvd.init()
torch.manual_seed(hvd.rank())
model = nn.Linear(2, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for step in range(5):
    x = torch.arange(8.0).view(4, 2)[hvd.rank() * 4 // hvd.size() :][: 4 // hvd.size()] + step
    optimizer.zero_grad()
    (model(x) ** 2).mean().mul(0.01).backward()
    optimizer.step()
place = hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
print("at", *place, "weights", *[f"{w:.5f}" for w in model.weight.detach().view(-1)], flush=True)
"""
SECRET = {"PACELINE_SECRET": "5a" * 32, "PACELINE_INTERFACE": "lo"}
MPI_NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")


def read_places(text: str) -> tuple[list[str], set[str]]:
    """The places of all ranks, and the weights that they have."""
    lines = re.findall(r"at ([0-9 ]+) weights (.*)", text)
    return sorted(place for place, _ in lines), {weights for _, weights in lines}


def test_two_hosts(job: Jobs) -> None:
    """Two launchers of two processes each, and as many in one: the same weights."""
    options = "--horovod", "--hosts", "2", "--join", f"127.0.0.1:{free_port()}"
    hosts = [
        job.run(TRAINED, 2, *options, "--host-rank", str(host), args=(), **SECRET)
        for host in (0, 1)
    ]
    ended = [host.end() for host in hosts]
    assert [each.code for each in ended] == [0, 0], ended[0].err + ended[1].err
    places, weights = read_places(ended[0].out + ended[1].out)
    assert places == ["0 0 2 0 2", "1 1 2 0 2", "2 0 2 1 2", "3 1 2 1 2"] and len(weights) == 1
    alone = job.run(TRAINED, 4, "--horovod").end()
    assert read_places(alone.out)[1] == weights, alone.err


@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_processes_of_another_launcher(job: Jobs, launcher: str) -> None:
    """They have the variables of Open MPI or Slurm, and no launcher of ours."""
    port = str(free_port())
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **SECRET}
    command = [sys.executable, "-m", "paceline.bridges.horovod", job.write(TRAINED)]
    started = [
        job.start(command, group=None, **make_place(launcher, rank), **meeting) for rank in range(2)
    ]
    ended = [each.end() for each in started]
    assert [each.code for each in ended] == [0, 0], ended[0].err + ended[1].err
    places, weights = read_places(ended[0].out + ended[1].out)
    assert places == ["0 0 2 0 1", "1 1 2 0 1"] and len(weights) == 1


def make_place(launcher: str, rank: int) -> dict[str, str]:
    """The variables that a launcher sets for one of two processes on a host."""
    values = (str(rank), "2", str(rank), "2")
    if launcher == "mpirun":
        names = [f"OMPI_COMM_WORLD_{name}" for name in MPI_NAMES]
        return dict(zip(names, values, strict=True))
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_JOB_ID": "77",
    }


def test_a_real_death(job: Jobs) -> None:
    body = "RESTARTED = False\n" + KILLED
    ended = job.run(body, 3, "--horovod", "--min-workers", "1").end()
    assert ended.code == 0, ended.err
    for line in ("from 0 with 3", "now 2", "from 5 with 2", "ended with 2"):
        assert line in ended.out
    assert "rank 1" in ended.err and "SIGKILL" in ended.err


def test_another_process_comes_in_for_the_dead_one(job: Jobs) -> None:
    body = "RESTARTED = True\n" + KILLED
    ended = job.run(body, 3, "--horovod", "--min-workers", "1", "--restarts", "1").end()
    assert ended.code == 0, ended.err
    assert "now 2" in ended.out and "now 3" in ended.out
    assert ended.out.count("ended with 3") == 3


def test_the_modules_are_the_bridge_itself_in_children_too(job: Jobs) -> None:
    body = """
import subprocess
import horovod, horovod.torch, paceline.bridges.horovod.torch as bridge
from horovod.common.exceptions import HorovodInternalError
assert horovod.torch is bridge and horovod.run.__module__.startswith("paceline")
assert issubclass(bridge.HorovodInternalError, HorovodInternalError)
assert (os.environ["HOROVOD_RANK"], os.environ["HOROVOD_SIZE"]) == (str(rank), "2")
subprocess.run([sys.executable, "-c", "import horovod.torch as hvd; hvd.Average"], check=True)
try:
    import horovod.mxnet
except ModuleNotFoundError:
    print("no mxnet")
"""
    ended = job.run(body, 2, "--horovod").end()
    assert ended.code == 0, ended.err
    assert ended.out.count("no mxnet") == 2


def test_run_gives_the_results_by_rank() -> None:
    def multiply(factor: float, *, more: float) -> float:
        import horovod.torch as hvd  # type: ignore[import-not-found]
        import torch

        hvd.init()
        return float(hvd.allreduce(torch.tensor([hvd.rank() * factor + more]), op=hvd.Sum))

    assert run(multiply, args=(2.0,), kwargs={"more": 1.0}, np=2) == [4.0, 4.0]


def test_horovodrun_on_the_launcher() -> None:
    request = make_request(["-np", "3", "-H", "localhost:4", "python", "train.py", "--lr", "1"])
    assert request.worker_command[1:] == ["-m", "paceline.bridges.horovod", "train.py", "--lr", "1"]
    assert (request.workers, request.min_workers, request.restarts) == (3, None, 0)
    request = make_request(
        ["-np", "3", "--min-np", "2", "--reset-limit", "5", "--start-timeout", "30", "train.py"]
    )
    assert (request.min_workers, request.restarts, request.deadline) == (2, 5, 30.0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("-np 2 -H other:2 python train.py", "--hosts N --join HOST:PORT"),
        ("-np 2 -H localhost:1,other:1 python train.py", "--hosts N --join HOST:PORT"),
        ("-np 2 -H localhost:1 python train.py", "fewer slots"),
        ("python train.py", "needs -np"),
        ("-np 2", "needs a Python script"),
        ("-np 2 --max-np 4 python train.py", "can't be honoured"),
        ("-np 2 --mpi-args x python train.py", "--mpi-args can't be honoured"),
        ("-np 2 --autotune python train.py", "--autotune can't be honoured"),
        ("-np 2 --fusion-threshold-mb 4 python train.py", "can't be honoured"),
    ],
)
def test_horovodrun_refuses_what_it_cannot_do(arguments: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make_request(arguments.split())


def test_run_refuses_what_it_cannot_do() -> None:
    with pytest.raises(UsageError, match=r"horovod.run\(hosts=...\) can't be honoured"):
        run(print, hosts="a:1,b:1")


@pytest.mark.parametrize(
    ("option", "fields"),
    [
        ("sync", {"sync": "AllReduce()"}),
        ("plan", {"plan": Path("plan.toml"), "sync": "AllReduce()"}),
        ("name", {"name": "x"}),
        ("resume", {"resumes": True, "name": None}),
        ("save-on-term", {"saves_on_term": True}),
    ],
)
def test_options_of_a_run_are_refused(option: str, fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"--horovod goes without --{option}:"):
        check_request(LaunchRequest(script=__file__, horovod=True, **fields))
