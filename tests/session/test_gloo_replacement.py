"""What asks for Gloo gets paceline, in processes that a script starts by itself, too."""

from __future__ import annotations

import sys

import pytest

from paceline.session.gloo_replacement import is_worker_program
from tests.harness.jobs import Jobs, free_port

SPAWNING = """
import torch.distributed as dist, torch.multiprocessing as mp

def train(rank, size, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    x = torch.ones(3) * (rank + 1)
    dist.all_reduce(x)
    sys.stdout.write(f"{dist.get_backend()} {rank} {x.tolist()}\\n")
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(train, (2, int(sys.argv[2])), nprocs=2, start_method=sys.argv[1])
"""  # noqa: E501


@pytest.mark.real_processes  # multiprocessing looks for scripts where it was first imported
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_children_of_a_worker_get_it_however_they_are_started(method: str, job: Jobs) -> None:
    ended = job.run(SPAWNING, 1, "--backend", "paceline", args=(method, str(free_port()))).end()
    assert ended.code == 0, ended.err
    assert all(f"paceline {rank} [3.0, 3.0, 3.0]" in ended.out for rank in range(2)), ended.out


UNTOUCHED = """
import torch.distributed as dist

dist.init_process_group()
x = torch.ones(3) * (int(os.environ["RANK"]) + 1)
dist.all_reduce(x)
print(dist.get_backend(), dist.get_rank(), x.tolist())
"""


@pytest.mark.parametrize("size", [1, 2])
def test_mpirun_starts_a_script_that_is_not_touched(size: int, job: Jobs) -> None:
    command = [sys.executable, "-m", "paceline.backend", job.write(UNTOUCHED)]
    started, port = [], str(free_port())
    for rank in range(size):
        told = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
        place = {f"OMPI_COMM_WORLD_{key}": str(value) for key, value in told.items()}
        started.append(job.start(command, MASTER_PORT=port, **place))
    for rank, each in enumerate(started):
        ended = each.end()
        assert ended.code == 0, ended.err
        assert f"paceline {rank} {[3.0] * 3 if size == 2 else [1.0] * 3}" in ended.out


STARTING = """
import subprocess
place = {**os.environ, "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
for _ in range(2):
    subprocess.run([sys.executable, "-c", "print('a worker')"], env=place, check=True)
subprocess.run([sys.executable, "-c", "print('no worker')"], check=True)
"""


def test_workers_that_are_programs_are_said_once_to_get_gloo(job: Jobs) -> None:
    ended = job.run(STARTING, 1, "--backend", "paceline").end()
    assert ended.code == 0, ended.err
    assert ended.err.count("starts workers as programs of their own, and they get Gloo") == 1


@pytest.mark.parametrize(
    ("command", "environment", "starts"),
    [
        (["torchrun", "--nproc-per-node", "2", "train.py"], None, True),
        (["/usr/bin/python3", "-m", "torch.distributed.run", "train.py"], None, True),
        (["accelerate", "launch", "train.py"], None, True),
        (["python", "train.py"], {"RANK": "7", "WORLD_SIZE": "8"}, True),
        (["python", "-m", "paceline.backend", "train.py"], {"RANK": "7"}, False),
        (["python", "train.py"], None, False),
        (["git", "status"], {"RANK": "7"}, False),
        ("torchrun train.py", None, False),
        ([], None, False),
    ],
)
def test_which_commands_start_workers(
    command: object, environment: dict[str, str] | None, starts: bool
) -> None:
    assert is_worker_program(command, environment) is starts
