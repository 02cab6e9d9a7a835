"""Jobs of real processes whose first worker is killed: another one goes on reporting, or the
next start does, to the same run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.jobs import jobs, wait_for
from tests.harness.tracked import Library, lines
from tests.harness.wandb_files import OfflineRun

tensorboard = Library("tensorboard.backend.event_processing.event_accumulator")
pytestmark = [*tensorboard.marks, *Library("wandb").marks]

pytestmark = pytest.mark.jobs

WRITTEN = """
import glob

def written(pattern):
    \"\"\"Wait until a tracker has what was logged first.\"\"\"
    end = time.monotonic() + 60
    while not any(b"loss" in open(path, "rb").read() for path in glob.glob(pattern)):
        assert time.monotonic() < end, "nothing was written there"
        time.sleep(0.01)
"""
SURVIVED = """
with pl.start(name="x", device="cpu") as run:
    first = run.is_first
    model, optimizer, loader = parts(run)
    for _ in run.epochs(2):
        for x, y in loader:
            step(run, model, optimizer, x, y)
            if first and run.steps == 5:
                written("runs/x/tensorboard/*")
                os.kill(os.getpid(), 9)
"""
RESTARTED = """
with pl.start(name="x", device="cpu") as run:
    model, optimizer, loader = parts(run)
    run.resume()
    for _ in run.epochs(2):
        for x, y in loader:
            step(run, model, optimizer, x, y)
            if run.steps == 3:
                run.save()
            if run.is_first and run.steps == 6 and not os.path.exists("killed"):
                open("killed", "w").close()
                written("runs/x/wandb/offline-run-*/*.wandb")
                os.kill(os.getpid(), 9)
"""


def losses(folder: Path) -> dict[int, float]:
    found = tensorboard.EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return {event.step: event.value for event in found.Scalars("loss")}


def logged(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines(folder) if "loss" in line}


def test_another_worker_goes_on(tmp_path: Path) -> None:
    with jobs(tmp_path) as started:
        ended = started.run(
            WRITTEN + SURVIVED, 2, "--min-workers", "1", "--report-to", "tensorboard,prometheus:0"
        ).end()
    assert ended.code == 0, ended.err
    folder = tmp_path / "runs" / "x"
    assert losses(folder) == pytest.approx(logged(folder), rel=1e-6) and max(logged(folder)) == 16
    assert len(list((folder / "tensorboard").iterdir())) == 2
    assert (
        len([line for line in ended.err.splitlines() if "prometheus: http://127.0.0.1:" in line])
        == 2
    )


def test_another_start_goes_on_in_the_same_run(tmp_path: Path) -> None:
    with jobs(tmp_path) as started:
        options = ("--restarts", "1", "--report-to", "tensorboard,wandb")
        job = started.run(
            WRITTEN + RESTARTED,
            2,
            *options,
            HOME=str(tmp_path),
            NETRC=str(tmp_path / "netrc"),
            WANDB_API_KEY="",
            WANDB_MODE="online",
        )
        ended = job.end()
    assert ended.code == 0, ended.err
    folder = tmp_path / "runs" / "x"
    assert losses(folder) == pytest.approx(logged(folder), rel=1e-6) and max(logged(folder)) == 16
    paths = sorted((folder / "wandb").glob("offline-run-*"))
    wait_for(lambda: OfflineRun(paths[-1]).exit == 0)
    runs = [OfflineRun(path) for path in paths]
    assert len(runs) == 2 and len({run.id for run in runs}) == 1
    # The checkpoint is of step 4. The first start has told of that step too if the workers handed
    # their logs over just before.
    again = {step: row["loss"] for step, row in runs[-1].history.items()}
    assert min(again) in (4, 5)
    assert again == {step: logged(folder)[step] for step in range(min(again), 17)}
