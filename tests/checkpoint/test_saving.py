"""Checkpoints in the background: what is on the disk is the state of the step of the save, and
nothing that goes wrong is lost.
"""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.checkpoint.files import checkpoint, disk
from paceline.errors import CheckpointError, Mismatch, PacelineError, UsageError
from paceline.notation import parse_notation
from paceline.session.run import Run
from paceline.state.snapshot import make_snapshot
from tests.harness.runs import batches, workers


class Gate:
    """Holds every write up until it is opened; counts those that are under way at once."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun = threading.Semaphore(0)
        self.steps: list[int] = []
        self.most = self._under_way = 0
        self._write = checkpoint.write_checkpoint

    def write(self, folder: Path, state: Any, step: int, **options: Any) -> Path:
        self._under_way += 1
        self.most = max(self.most, self._under_way)
        self.begun.release()
        assert self.open.wait(60)
        path = self._write(folder, state, step, **options)
        self.steps.append(step)
        self._under_way -= 1
        return path


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    found = Gate()
    monkeypatch.setattr(checkpoint, "write_checkpoint", found.write)
    yield found
    found.open.set()


def ready(run: Run) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).double()
    return run.prepare(model, torch.optim.AdamW(model.parameters(), 0.01), batches())


def train(run: Run, each: Callable[[int], None]) -> None:
    """Five steps, with a call at the end of each."""
    model, optimizer, loader = ready(run)
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        run.log(loss=0.0)
        each(run.steps + 1)


def loaded(folder: Path, **options: Any) -> checkpoint.Checkpoint:
    return checkpoint.load_checkpoint(folder / "test" / "checkpoints", say=print, **options)


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "test" / "summary.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize(("size", "sync"), [(1, "AllReduce()"), (2, "LocalSGD(4)")])
def test_it_holds_the_state_of_the_save_though_training_went_on(
    tmp_path: Path, gate: Gate, size: int, sync: str
) -> None:
    wanted: dict[int, list[str]] = {rank: [] for rank in range(size)}

    def body(run: Run) -> None:
        def each(step: int) -> None:
            if step == 2:
                path = run.save(background=True)
                wanted[run.rank] = [
                    run._prepared.state.take_snapshot(copy=False).compute_sha256(),
                    run._own.pack_snapshot().compute_sha256(),
                    str(path),
                ]
                assert not path.exists()
            if step == 5 and run.is_first:
                # what it was made of has changed
                assert (
                    wanted[0][0] != run._prepared.state.take_snapshot(copy=False).compute_sha256()
                )
                assert size == 1 or wanted[0][1] != run._own.pack_snapshot().compute_sha256()
                gate.open.set()

        train(run, each)

    workers(size, body, folder=tmp_path, strategy=parse_notation(sync))
    found = loaded(tmp_path)
    assert (found.step, str(found.path)) == (2, wanted[0][2])
    assert found.snapshot.compute_sha256() == wanted[0][0]
    assert {rank: state.compute_sha256() for rank, state in found.worker_snapshots.items()} == {
        rank: wanted[rank][1] for rank in range(size)
    }


def test_it_is_resumed_like_any_other(tmp_path: Path) -> None:
    def body(background: bool, run: Run) -> None:
        train(run, lambda step: step == 3 and run.save(background=background))

    def again(run: Run) -> int:
        ready(run)
        assert run.resume()
        return run.steps

    for background in (False, True):
        workers(1, partial(body, background), folder=tmp_path / str(background))
    plain, other = (loaded(tmp_path / str(background)) for background in (False, True))
    assert plain.snapshot.compute_sha256() == other.snapshot.compute_sha256()
    assert workers(2, again, folder=tmp_path / "True") == [3, 3]


def test_a_save_waits_for_the_one_under_way(tmp_path: Path, gate: Gate) -> None:
    def body(run: Run) -> None:
        def each(step: int) -> None:
            if step == 2 and run.is_first:
                assert gate.begun.acquire(timeout=60) and gate.most == 1
                threading.Timer(0.2, gate.open.set).start()
            run.save(background=step < 5, keep=2)

        train(run, each)
        # the last one was not in the background
        assert gate.steps == [1, 2, 3, 4, 5] and gate.most == 1

    workers(1, body, folder=tmp_path)
    found = summary(tmp_path)["checkpoints"]
    assert (
        found["count"] == 5
        and found["background"] == 4
        and found["stall_seconds"] > 0
        and found["write_seconds"] > 0.15
    )
    sizes = {
        path.stat().st_size
        for path in (tmp_path / "test" / "checkpoints").glob("*/tensors.safetensors")
    }
    assert len(sizes) == 1 and found["nbytes"] == 5 * sizes.pop()
    assert len(list((tmp_path / "test" / "checkpoints").iterdir())) == 2


def test_the_end_of_the_run_waits_for_it(tmp_path: Path, gate: Gate) -> None:
    def body(run: Run) -> None:
        train(run, lambda step: step == 5 and run.save(background=True))
        if run.is_first:
            assert gate.begun.acquire(timeout=60)  # it takes the 0.2 s from now on at least
            threading.Timer(0.2, gate.open.set).start()

    workers(2, body, folder=tmp_path)
    assert loaded(tmp_path).step == 5
    assert (
        summary(tmp_path)["checkpoints"]["count"] == 1
        and summary(tmp_path)["checkpoints"]["write_seconds"] > 0.15
    )


def test_a_run_that_fails_still_finishes_it(tmp_path: Path, gate: Gate) -> None:
    def each(run: Run, step: int) -> None:
        if step == 3:
            run.save(background=True)
            threading.Timer(0.2, gate.open.set).start()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        workers(1, lambda run: train(run, lambda step: each(run, step)), folder=tmp_path)
    assert loaded(tmp_path).step == 3


def test_resume_waits_for_it(tmp_path: Path, gate: Gate) -> None:
    def body(run: Run) -> None:
        train(run, lambda step: step == 3 and run.save(background=True))
        if run.is_first:
            threading.Timer(0.2, gate.open.set).start()
        assert run.resume() and run.steps == 3

    workers(2, body, folder=tmp_path)


def test_memory_is_used_again_and_let_go(tmp_path: Path) -> None:
    places: list[int] = []

    def body(run: Run) -> None:
        def each(step: int) -> None:
            run.save(background=True)
            assert run._saving._copy_memory is not None
            places.append(run._saving._copy_memory.get_block(0, 1).data_ptr())

        train(run, each)
        run.close()
        assert run._saving._copy_memory is None

    workers(1, body, folder=tmp_path)
    assert len(places) == 5 and len(set(places)) == 1


def test_a_run_that_saves_nothing_says_so(tmp_path: Path) -> None:
    workers(2, lambda run: train(run, lambda step: None), folder=tmp_path)
    assert summary(tmp_path)["checkpoints"] == {
        "count": 0,
        "stall_seconds": 0.0,
        "write_seconds": 0.0,
        "nbytes": 0,
        "background": 0,
    }


def test_one_in_the_background_and_one_not_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        Mismatch, match=r"rank 0 .*at run\.save, written.*rank 1 .*at run\.save, begun"
    ):
        workers(
            2,
            lambda run: train(run, lambda step: step == 2 and run.save(background=run.rank == 1)),
            folder=tmp_path,
        )


@pytest.mark.parametrize("background", [False, True])
def test_arguments_are_checked_on_all(tmp_path: Path, background: bool) -> None:
    caught: list[str] = []

    def body(run: Run) -> None:
        with pytest.raises(UsageError, match="keep=0"):
            run.save(keep=0, background=background)
        caught.append("there")

    workers(2, body, folder=tmp_path)
    assert len(caught) == 2


# Failures
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A disk that has no room for the first checkpoint."""
    real = disk.write_file

    def refuse(path: Path, *parts: Any, **options: Any) -> Any:
        monkeypatch.setattr(disk, "write_file", real)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "write_file", refuse)
    return refuse


def caught(act: Callable[[], Any]) -> str:
    try:
        act()
    except PacelineError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("call", ["background", "durable", "resume"])
def test_a_failure_is_raised_by_the_next_call_on_all(tmp_path: Path, call: str) -> None:
    said: list[str] = []
    errors: dict[int, str] = {}

    def body(run: Run) -> None:
        def each(step: int) -> None:
            if step == 2:
                run.save(background=True)
            if step == 3 and run.is_first:
                wait_until(lambda: said)  # at once, not only at the next call
            if step == 4:
                errors[run.rank] = caught(
                    run.resume
                    if call == "resume"
                    else lambda: run.save(background=call == "background")
                )
                run.save()  # and is not raised twice

        train(run, each)

    workers(2, body, folder=tmp_path, said=said)
    assert errors[0].startswith("CheckpointError: step 2 was not saved, the disk is full: ")
    assert (
        errors[1].startswith("Mismatch: the first worker failed at run.")
        and "step 2 was not saved, the disk is full" in errors[1]
    )
    assert (
        sum("step 2 was not saved" in text and "The next save raises this" in text for text in said)
        == 1
    )
    found = summary(tmp_path)
    assert found["checkpoints"]["count"] == 1 and [
        event["what"].split(",")[0] for event in found["events"]
    ] == ["step 2 was not saved"]
    assert loaded(tmp_path).step == 4


@pytest.mark.usefixtures("full")
def test_a_failure_is_raised_by_the_end_on_all_and_the_summary_is_there(tmp_path: Path) -> None:
    errors: dict[int, str] = {}

    def body(run: Run) -> None:
        train(run, lambda step: step == 5 and run.save(background=True))
        errors[run.rank] = caught(run.close)

    workers(2, body, folder=tmp_path)
    assert (
        errors[0].startswith("CheckpointError: step 5 was not saved")
        and errors[1].startswith("Mismatch: ")
        and "step 5" in errors[1]
    )
    found = summary(tmp_path)
    assert found["steps"] == 5 and "step 5 was not saved" in found["events"][0]["what"]


def test_a_disk_that_hangs_is_given_up(tmp_path: Path, gate: Gate) -> None:
    """The deadline is that of the run: 20 s here, so it would be 10 s."""
    errors: dict[int, str] = {}

    def body(run: Run) -> None:
        run._saving._write_timeout = 0.2

        def each(step: int) -> None:
            if step == 2:
                run.save(background=True)
            if step == 3:
                errors[run.rank] = caught(lambda: run.save(background=True))
                gate.open.set()
                # what was held back is written now, as fast as a busy machine can
                run._saving._write_timeout = 20.0

        train(run, each)

    workers(2, body, folder=tmp_path)
    assert errors[0].startswith(
        "CheckpointError: step 2 was not on the disk in time: 0.0 of 0.0 MB"
    )
    assert "step 2 was not on the disk" in errors[1]
    assert loaded(tmp_path).step == 2 and summary(tmp_path)["checkpoints"]["count"] == 1


def test_patience_ends_before_that_of_the_others(tmp_path: Path) -> None:
    workers(1, lambda run: [ready(run), run.save()], folder=tmp_path)
    [patience] = workers(1, lambda run: run._saving._write_timeout)
    assert patience == 10.0  # of start(deadline=20)


def test_what_was_promised_by_a_worker_that_died_is_missed(tmp_path: Path) -> None:
    said: list[str] = []

    def body(run: Run) -> None:
        def each(step: int) -> None:
            if step == 2:
                # as another first worker would have left it
                run._saving._promised_path = tmp_path / "step-00000001"
            if step == 4:
                run.save()

        train(run, each)

    workers(1, body, folder=tmp_path, said=said)
    assert [event["what"] for event in summary(tmp_path)["events"]] == [
        "step-00000001 was lost with the worker that wrote it"
    ]
    assert "step-00000001 was lost with the worker that wrote it" in said


def test_what_another_version_had_for_each_worker_is_named(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        ready(run)
        checkpoint.save_checkpoint(
            run.folder.checkpoints,
            run._prepared.state.take_snapshot(),
            1,
            own={0: make_snapshot({"randomness": None, "moon": 1})},
        )
        run.resume()

    with pytest.raises(
        CheckpointError,
        match="the state of worker 0 lacks optimizers, sync: another version",
    ):
        workers(1, body, folder=tmp_path)


@pytest.mark.parametrize("kept", [False, True])
def test_a_scheduler_that_is_in_no_checkpoint_is_said_once(tmp_path: Path, *, kept: bool) -> None:
    said: list[str] = []

    def body(run: Run) -> None:
        model = nn.Linear(6, 2).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        run.prepare(model, optimizer)
        if kept:
            run.keep("schedule", scheduler)
        run.save()
        run.save()

    workers(2, body, folder=tmp_path, said=said)
    assert sum(
        "a learning rate scheduler of the SGD was not given to run.prepare" in text for text in said
    ) == (not kept)
