"""Checkpoints of real processes: killed while they write in the background, damaged, resumed."""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch

import paceline as pl
from paceline.checkpoint.files import checkpoint
from tests.harness.jobs import Jobs, wait_for
from tests.harness.survivors import outcome, script

# The first worker dies in its thread, when most of its first checkpoint is written.
DYING = """
    from paceline.checkpoint.files import disk
    whole = disk.write_file
    def write(path, parts, **options):
        found = whole(path, parts, **options)
        while run.steps < 5:  # or the others may not know yet that it was begun, and begin it again
            time.sleep(0.01)
        die(path.name == "tensors.safetensors", "in the middle")
        return found
    disk.write_file = write
"""
SAVING = """
            while run.steps == 13 and not (out / "in the middle").exists():  # the thread that writes gives way to all others
                time.sleep(0.01)
            if run.steps == 14:
                (out / "left").write_text(" ".join(path.name for path in run.folder.checkpoints.iterdir()))
            if run.steps in (4, 14, 19, 24):
                run.save(background=True, keep=1, metric=(run.steps - 17) ** 2, best="min")
"""  # noqa: E501


@pytest.mark.slow
def test_the_writer_dies_and_another_worker_saves_next(job: Jobs, tmp_path: Path) -> None:
    text = script(start="name='run', folder='runs'", nap=0.01, prepared=DYING, after=SAVING)
    ended = job.run(text, 3, "--min-workers", "1", OUT=str(tmp_path)).end()
    assert ended.code == 0, ended
    found = outcome(tmp_path, tmp_path)
    assert found.size == 2 and found.logged == list(range(1, 37))
    assert found.events[1:] == ["step-00000005 was lost with the worker that wrote it"], (
        found.events
    )
    assert (tmp_path / "left").read_text().startswith(".saving-")  # and no checkpoint
    folder = tmp_path / "runs" / "run" / "checkpoints"
    # the best, and the newest
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000020", "step-00000025"]
    assert [
        checkpoint.load_checkpoint(folder, say=print, best=best).worker_snapshots.keys()
        for best in (True, False)
    ] == [{0, 1}] * 2
    assert checkpoint.load_checkpoint(folder, say=print, best=True).step == 20
    assert "step 20 is the best so far: 4, after 9 at step 15" in ended.err
    summary = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
    assert summary["checkpoints"]["best"] == {
        "checkpoint": "step-00000020",
        "step": 20,
        "metric": 4.0,
        "best": "min",
    }


REFUSED = """
with pl.start(name="run") as run:
    model, optimizer, loader = parts(run)
    for x, y in loader:
        step(run, model, optimizer, x, y)
    if run.is_first:
        (run.folder.path / "summary.json").mkdir()
"""


@pytest.mark.slow
def test_a_summary_that_can_not_be_written_is_no_loss_to_go_on_after(
    job: Jobs, tmp_path: Path
) -> None:
    ended = job.run(REFUSED, 2, "--min-workers", "1", "--restarts", "1").end()
    assert ended.code == 1, ended
    assert "summary.json could not be written (Is a directory); free some space" in ended.err


KILLED = """
class Step:
    def __init__(self):
        self.x = torch.zeros(300_000)
    def state_dict(self):
        return {"x": self.x}
    def load_state_dict(self, state):
        self.x = state["x"]

with pl.start(name="run") as run:
    model, optimizer, loader = parts(run, samples=100_000)
    kept = Step()
    run.keep("step", kept)
    for number, (x, y) in enumerate(loader):
        step(run, model, optimizer, x, y)
        kept.x.fill_(run.steps + 1)
        run.save(background=True, keep=2)
        kept.x.fill_(-1)
        if number == 3:
            print("ready", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(2))
def test_killed_at_any_moment(job: Jobs, tmp_path: Path, turn: int) -> None:
    started = job.start([sys.executable, job.write(KILLED)])
    assert started.process.stdout is not None and started.process.stdout.readline() == "ready\n"
    time.sleep(random.Random(turn).uniform(0, 0.2))
    started.process.kill()
    started.end()
    folder = tmp_path / "runs" / "run" / "checkpoints"
    found = checkpoint.load_checkpoint(folder, say=print)
    assert torch.equal(
        found.snapshot.unpack_state()["kept.step"]["x"], torch.full((300_000,), float(found.step))
    )
    assert found.step >= 3


RESUMED = """
with pl.start(name="run") as run:
    model, optimizer, loader = parts(run)
    run.print("at", run.steps if run.resume() else None)
    for x, y in loader:
        step(run, model, optimizer, x, y)
        if run.steps + 1 in (2, 4, 6):
            run.save(background=True)
"""


@pytest.mark.slow
def test_two_workers_resume_past_what_is_broken(job: Jobs, tmp_path: Path) -> None:
    assert job.run(RESUMED).end().code == 0
    folder = tmp_path / "runs" / "run" / "checkpoints"
    (folder / "step-00000006" / "own-00001.json").unlink()
    body = folder / "step-00000004" / "tensors.safetensors"
    body.write_bytes(body.read_bytes()[:-3])
    shutil.copytree(folder / "step-00000002", folder / ".saving-x" / "new")
    ended = job.run(RESUMED).end()
    assert ended.code == 0 and ended.out == "[0] at 2\n", ended
    [line] = [line for line in ended.err.splitlines() if "complete" in line]
    assert (
        "step-00000006: own-00001.json can't be read" in line
        and "step-00000004: tensors.safetensors has" in line
    )
    assert line.endswith("Using step-00000002, which is complete")
    assert [path.name for path in (tmp_path / "runs" / "run-2" / "checkpoints").iterdir()]


FULL = """
import errno
from paceline.checkpoint.files import disk

def refuse(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")

disk.write_file = refuse
with pl.start(name="run") as run:
    model, optimizer, loader = parts(run)
    for x, y in loader:
        step(run, model, optimizer, x, y)
        if run.steps == 2:
            run.save(background=True)
"""


@pytest.mark.slow
def test_what_failed_in_the_background_ends_the_job_in_words(job: Jobs, tmp_path: Path) -> None:
    ended = job.run(FULL).end()
    assert ended.code == 1 and "(CheckpointError)" in ended.last and "rank 0" in ended.last, (
        ended.err
    )
    assert "step 3 was not saved, the disk is full" in ended.said
    assert (tmp_path / "runs" / "run" / "summary.json").exists()
    wait_for(lambda: not job.left(0))


CUT = """
with pl.start(name="cut") as run:
    torch.set_default_dtype(torch.float64)
    with pl.meta():
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    data = TensorDataset(torch.randn(43, 4, generator=torch.Generator().manual_seed(1)), torch.ones(43, 1))
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=8))
    run.resume()
    for _ in run.epochs(2):
        for x, y in loader:
            step(run, model, optimizer, x, y)
            if run.steps + 1 == int(sys.argv[1]):
                run.save(background=True)
                sys.exit(0)
    run.save()
"""  # noqa: E501


def test_processes_go_on_in_another_layout(job: Jobs, tmp_path: Path) -> None:
    both = (
        "--mesh",
        "shard=2, tensor=2",
        "--cut",
        """tensor({"0": column(), "2": row()}), shard("0", zero=3)""",
    )
    said = ""
    for folder, size, options, until in (
        ("a", 4, both, 5),
        ("a", 2, ("--cut", 'shard("2", zero=1)'), 0),
        ("b", 1, (), 0),
    ):
        body = CUT.replace('name="cut"', f'name="{folder}", seed=7')
        ended = job.run("import sys\n" + body, size, *options, args=(str(until),)).end()
        assert ended.code == 0, ended.err
        said += ended.err
    assert "resumed from runs/a/checkpoints/step-00000005 at step 5" in said
    found, alone = (pl.state_dict(tmp_path / "runs" / name) for name in ("a-2", "b"))
    assert all(
        torch.allclose(found[name], tensor, rtol=0, atol=1e-12) for name, tensor in alone.items()
    )
    assert job.left() == []
