"""TensorBoard's own reader finds what metrics.jsonl has, after another start, too; a full disk
ends no run.
"""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.record.trackers.tensorboard import EVENTS_TAG, EventFile, TensorBoardTracker
from paceline.record.trackers.tracker import TrackedRun, TrackedStep
from paceline.session.run import Run
from tests.harness.runs import workers
from tests.harness.tracked import STEPS, Library, lines, reported, rows, summary, train

tensorboard = Library("tensorboard.backend.event_processing.event_accumulator")
pytestmark = tensorboard.marks
ALL = {"scalars": 0, "tensors": 0, "histograms": 0, "images": 0}


def read(folder: Path) -> Any:
    found = tensorboard.EventAccumulator(str(folder), size_guidance=ALL)
    found.Reload()
    return found


def scalars(found: Any) -> dict[int, dict[str, float]]:
    """Numbers by step and name; how late workers were is measured by the clock, and left out, as
    are results at the end.
    """
    by_step: dict[int, dict[str, float]] = {}
    for name in found.Tags()["scalars"]:
        for event in (
            found.Scalars(name) if not name.startswith(("paceline/late/", "summary/")) else ()
        ):
            by_step.setdefault(event.step, {})[name] = event.value
    return by_step


def single(values: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    """The same numbers in the 32 bits that TensorBoard has for each."""
    return {
        step: {name: float(np.float32(value)) for name, value in found.items()}
        for step, found in values.items()
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, list[str]]:
    said: list[str] = []
    folder = reported(tmp_path_factory.mktemp("run"), [TensorBoardTracker("")], said)
    return folder, read(folder / "tensorboard"), said


def test_numbers_are_those_of_the_log(run: Any) -> None:
    folder, found, said = run
    assert scalars(found) == single(rows(folder))
    assert len(scalars(found)) == STEPS and {
        "loss",
        "rank",
        "val/accuracy",
        "paceline/samples_per_second",
    } <= set(scalars(found)[STEPS])
    assert {event.value for event in found.Scalars("rank")} >= {0.5}  # the mean over both workers
    assert f"tensorboard: tensorboard --logdir {folder.parent}" in said
    assert [event.wall_time for event in found.Scalars("loss")] == [
        line["time"] for line in lines(folder) if "loss" in line
    ]


def test_events_are_text_and_the_summary_hyperparameters(run: Any) -> None:
    folder, found, _ = run
    texts = [
        event.tensor_proto.string_val[0].decode()
        for event in found.Tensors(f"{EVENTS_TAG}/text_summary")
    ]
    assert texts == [event["what"] for event in summary(folder)["events"]]
    plugin = found.SummaryMetadata("_hparams_/session_start_info").plugin_data
    assert plugin.plugin_name == "hparams" and all(
        word in plugin.content for word in (b"AllReduce()", b"optimizers/0/lr")
    )
    assert found.Scalars("summary/final_loss")[0].value == np.float32(summary(folder)["final_loss"])
    assert found.Scalars("summary/results/score")[0].value == 0.5


def test_histograms_and_images(run: Any) -> None:
    _, found, _ = run
    histograms = found.Histograms("weights")
    assert [event.step for event in histograms] == [5, 10]
    assert all(
        sum(event.histogram_value.bucket) == event.histogram_value.num == 2 for event in histograms
    )
    images = found.Images("sample")
    assert [(event.step, event.width, event.height) for event in images] == [(5, 3, 3), (10, 3, 3)]
    image = importlib.import_module("PIL.Image")
    assert np.array_equal(
        np.asarray(image.open(io.BytesIO(images[1].encoded_image_string))), np.eye(3) * 255
    )


def test_another_start_goes_on_and_takes_steps_again(tmp_path: Path) -> None:
    for again, numbers, value in ((False, range(1, 6), 1.0), (True, range(3, 8), 2.0)):
        tracker = TensorBoardTracker(str(tmp_path))
        tracker.begin_run(TrackedRun("x", tmp_path, "id", 0.0, again=again))
        if again:
            tracker.rewind_to_step(2)
        tracker.log_steps([TrackedStep(number, 0.0, {"loss": value}) for number in numbers])
        tracker.close(failed=not again)
        tracker.close(failed=not again)
    assert [(event.step, event.value) for event in read(tmp_path / "x").Scalars("loss")] == [
        *((1, 1.0), (2, 1.0), *((step, 2.0) for step in range(3, 8))),
    ]


def test_a_full_disk_is_said_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = EventFile.flush

    def full(self: EventFile) -> None:
        written(self)
        with Path("/dev/full").open("wb") as disk:
            disk.write(b"x" * 100_000)

    said: list[str] = []
    tracker = TensorBoardTracker("")
    begin = tracker.begin_run

    def begins(run: TrackedRun) -> str:
        where = begin(run)
        monkeypatch.setattr(EventFile, "flush", full)  # from now on
        return where

    monkeypatch.setattr(tracker, "begin_run", begins)
    folder = reported(tmp_path, [tracker], said)
    assert len(lines(folder)) == STEPS + 2
    assert [line for line in said if "No space left" in line] == [
        "tensorboard gets nothing more of this run (OSError: [Errno 28] No space left on device); "
        "training goes on, and the run's folder has everything"
    ]


def test_the_writer_of_a_script_keeps_working(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    def body(run: Run) -> None:
        writer = SummaryWriter(str(tmp_path / "own")) if run.is_first else None
        train(run)
        if writer is not None:
            writer.add_scalar("mine", 7.0, run.steps)
            writer.close()

    workers(2, body, folder=tmp_path, trackers=[TensorBoardTracker("")])
    (event,) = read(tmp_path / "own").Scalars("mine")
    assert (event.step, event.value) == (STEPS, 7.0)
    assert scalars(read(tmp_path / "test" / "tensorboard")) == single(rows(tmp_path / "test"))
