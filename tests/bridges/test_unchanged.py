"""Scripts of other libraries, unchanged: the same losses as on Gloo, and really on paceline."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

# Libraries are imported before workers are forked.
import accelerate  # noqa: F401
import lightning
import lightning.fabric  # noqa: F401
import pytest
import torch.distributed as dist
from transformers import GPT2LMHeadModel, Trainer  # noqa: F401

from paceline.comm.backend.process_group import GroupBackend
from paceline.session.gloo_replacement import replace_gloo
from tests.harness import unchanged_scripts as scripts
from tests.harness.jobs import PLAIN, Jobs, jobs
from tests.harness.torchrun_workers import run_workers

TORCH = [
    scripts.train_toy,
    scripts.train_gpt,
    scripts.train_images,
    scripts.train_sharded,
    scripts.train_compiled,
]
LIBRARIES = [
    scripts.train_by_accelerate,
    scripts.train_by_trainer,
    scripts.train_by_fabric,
    scripts.train_by_lightning,
]


class Result(NamedTuple):
    """What came of a script in one worker."""

    backend: str
    reductions: int  # all-reduces that a group of paceline has made
    losses: list[float]


def run_script(script: Callable[[], list[float]], *, replaced: bool) -> Result:
    calls = 0
    if replaced:
        replace_gloo()
        for name in ("allreduce", "allreduce_coalesced", "reduce_scatter_single"):
            own = getattr(GroupBackend, name)

            def count(self: GroupBackend, *args: object, own: object = own, **kw: object) -> object:
                nonlocal calls
                calls += 1
                return own(self, *args, **kw)  # type: ignore[operator]

            setattr(GroupBackend, name, count)
    losses = script()
    backend = dist.get_backend()
    dist.barrier()
    dist.destroy_process_group()
    return Result(backend, calls, losses)


def compare(script: Callable[[], list[float]], size: int, folder: Path) -> None:
    wanted = run_workers(size, functools.partial(run_script, script, replaced=False), folder)
    found = run_workers(size, functools.partial(run_script, script, replaced=True), folder)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.backend, theirs.backend) == ("paceline", "gloo")
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-5, abs=1e-6)
        assert ours.reductions > 0
    # different data on each worker would give other losses without any exchange
    assert len(wanted[0].losses) > 2


@pytest.mark.parametrize("script", TORCH, ids=lambda script: script.__name__)
def test_scripts_of_torch_give_what_they_give_on_gloo(
    script: Callable[[], list[float]], tmp_path: Path
) -> None:
    compare(script, 3, tmp_path)


@pytest.mark.parametrize("script", LIBRARIES, ids=lambda script: script.__name__)
def test_scripts_of_libraries_give_what_they_give_on_gloo(
    script: Callable[[], list[float]], tmp_path: Path
) -> None:
    compare(script, 2, tmp_path)


WHOLE = """
from accelerate import Accelerator
from transformers import TrainingArguments
import torch.distributed as dist

accelerator = Accelerator()  # on Gloo it would see one process, without cpu=True
total = accelerator.reduce(torch.tensor(accelerator.process_index + 1.0))
arguments = TrainingArguments(output_dir="out", report_to=[])
sys.stdout.write(f"{dist.get_backend()} {arguments.world_size} {float(total)}\\n")
"""


def test_the_command_gives_them_the_backend(job: Jobs) -> None:
    ended = job.run(WHOLE, 2, "--backend", "paceline").end()
    assert ended.code == 0, ended.err
    assert ended.out.count("paceline 2 3.0") == 2


SPAWNED = """
import os

import torch.distributed as dist
from lightning.fabric import Fabric


def work(fabric):
    total = fabric.all_reduce(torch.tensor(fabric.global_rank + 1.0), reduce_op="sum")
    os.write(1, f"{dist.get_backend()} {fabric.world_size} {float(total)}\\n".encode())


if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn")
    fabric.launch(work)
"""


def test_processes_that_lightning_spawns_get_it_too(tmp_path: Path) -> None:
    # multiprocessing keeps the folder in which it was imported, so nothing is forked here.
    with jobs(tmp_path, PLAIN) as job:
        ended = job.run(SPAWNED, 1, "--backend", "paceline").end()
        for left in job.temporary.glob("pytorch-errorfile-*"):  # torch leaves them behind
            left.unlink()
    assert ended.code == 0, ended.err
    assert ended.out.count("paceline 2 3.0") == 2, ended.err
