"""The backend in whole jobs: libraries on torch.distributed that never heard of paceline give
what they give on Gloo.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from paceline import backend
from tests.harness import short_timings
from tests.harness.jobs import Jobs
from tests.harness.libraries import BUCKETS, LIBRARIES, check_alike


def test_libraries_give_what_they_give_on_gloo(job: Jobs) -> None:
    ended = job.program(LIBRARIES, 3, args=("gloo", "paceline")).end()
    assert ended.code == 0, ended.err
    check_alike(ended.out)
    for name, moved in (("gloo", {False}), ("paceline", {True})):
        assert ended.out.count(f"{name}: gradients are in memory of all ranks: {moved}") == 3


def test_ddp_trains_the_same_in_each_of_its_ways_whether_its_buckets_move_or_not(job: Jobs) -> None:
    ended = job.program(BUCKETS, 3, args=("gloo", "paceline")).end()
    assert ended.code == 0, ended.err
    line = next(line for line in ended.out.splitlines() if "FOUND " in line)
    wanted, found = json.loads(line.partition("FOUND ")[2])
    for name, (values, _) in wanted.items():
        theirs, ours = np.array(values), np.array(found[name][0])
        # Two ranks add in one order, and Gloo rounds each addition of halves.
        within = {"some ranks": 0.0, "fp16": 1e-3}.get(name, 1e-6)
        assert np.linalg.norm(ours - theirs) <= within * np.linalg.norm(theirs), name
    moved = {name: count for name, (_, count) in found.items()}
    assert {name for name, count in moved.items() if not count} == {"hook", "fp16"}, (
        "what Python reduces stays where it is"
    )
    assert moved["two models"] == 2 * moved["plain"] > 2


UNTOUCHED = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(3) * (dist.get_rank() + 1)
dist.all_reduce(x)
dist.monitored_barrier()
sys.stdout.write(f"{dist.get_backend()} {x.tolist()} {sys.argv} {os.path.basename(sys.path[0])}\\n")
dist.destroy_process_group()
"""


def test_torchrun_starts_a_script_that_is_not_touched(job: Jobs) -> None:
    script = job.folder / "untouched.py"
    script.write_text(UNTOUCHED)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "paceline.backend",
    ]
    ended = job.start([*torchrun, str(script), "--some", "7"]).end()
    assert ended.code == 0, ended.err
    assert (
        ended.out.count(
            f"paceline [3.0, 3.0, 3.0] {[str(script), '--some', '7']} {job.folder.name}"
        )
        == 2
    )


BY_NAME = """
import torch.distributed as dist
import paceline.backend

dist.init_process_group("paceline")
x = torch.ones(3) * (rank + 1)
dist.all_reduce(x)
print(dist.get_backend(), x.tolist(), type(dist.group.WORLD).__name__)
if rank == 1:
    os.kill(os.getpid(), 9)
dist.all_reduce(x)
"""


def test_a_worker_that_dies_is_named_at_once(job: Jobs) -> None:
    # so that rank 0 is there to say it
    ended = job.run(BY_NAME, 2, **short_timings.environ(supervisor={"culprit": 20.0})).end()
    assert ended.code == 137
    assert ended.out.count("paceline [3.0, 3.0, 3.0] GroupBackend") == 2
    assert "WorkerLost: rank 1 has died while rank 0 waits for it in all_reduce" in ended.err
    assert "Of these, rank 1 is on host " in ended.err


APART = """
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(3 + rank)
dist.all_reduce(x)
"""


def test_calls_that_differ_are_an_error_instead_of_the_end_of_the_process(job: Jobs) -> None:
    ended = job.run(APART, 2, "--backend", "paceline").end()
    assert ended.code == 1
    assert "Mismatch: workers have come apart: rank 0 at all_reduce (float32 [3]), sum" in ended.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--backend", "nccl"], "--backend is nccl; possible: paceline"),
        (["--backend", "paceline", "--min-workers", "1"], "leave out --min-workers"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(job: Jobs, options: list[str], words: str) -> None:
    ended = job.program(LIBRARIES, 2, *options).end()
    assert ended.code == 2 and words in ended.last


def test_without_a_script_it_says_how_it_is_called() -> None:
    with pytest.raises(
        SystemExit, match=r"^usage: python -m paceline\.backend SCRIPT \[ARGUMENTS\]$"
    ):
        backend.main([])
