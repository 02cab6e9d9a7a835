"""W&B's offline files hold what metrics.jsonl has; without a key nobody is asked, and an
unreachable server ends no run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.record.trackers import wandb as tracked
from paceline.record.trackers.tracker import TrackedRun, TrackedStep
from paceline.record.trackers.wandb import WandbTracker
from tests.harness.jobs import wait_for
from tests.harness.tracked import STEPS, Library, reported, rows, summary
from tests.harness.wandb_files import OfflineRun

wandb = Library("wandb")
pytestmark = wandb.marks
PATCH = pytest.MonkeyPatch()


@pytest.fixture(autouse=True, scope="module")
def _nobody(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A user without settings or keys; W&B's process ends with the module."""
    wandb.teardown()
    with PATCH.context() as patch:
        home = tmp_path_factory.mktemp("home")
        for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
            patch.setenv(name, str(home))
        patch.setenv("NETRC", str(home / "netrc"))
        for name in (
            "WANDB_API_KEY",
            "WANDB_MODE",
            "WANDB_PROJECT",
            "WANDB_ENTITY",
            "WANDB_RUN_ID",
        ):
            patch.delenv(name, raising=False)
        yield
        wandb.teardown()


def offline(folder: Path) -> list[OfflineRun]:
    """The offline runs in the folder of a run, oldest first, once W&B's process has written them
    to their end.
    """
    paths = sorted((folder / "wandb").glob("offline-run-*"))
    wait_for(lambda: all(OfflineRun(path).exit is not None for path in paths))
    return [OfflineRun(path) for path in paths]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, OfflineRun, list[str]]:
    said: list[str] = []
    folder = reported(tmp_path_factory.mktemp("run"), [WandbTracker("team/project")], said)
    (found,) = offline(folder)
    return folder, found, said


def test_numbers_are_those_of_the_log(run: Any) -> None:
    folder, found, _ = run
    beside = ("_", "paceline/late/", "paceline/event", "weights/", "sample/")
    history = {
        step: {name: value for name, value in values.items() if not name.startswith(beside)}
        for step, values in found.history.items()
    }
    assert history == rows(folder)
    assert len(history) == STEPS and "val/accuracy" in history[5]


def test_the_summary_is_there_and_events_are_text(run: Any) -> None:
    folder, found, _ = run
    assert (found.name, found.project, found.exit) == ("test", "project", 0)
    assert (
        found.config["sync"] == "AllReduce()"
        and found.config["seed"] == 1
        and found.config["workers"] == 2
    )
    assert found.config["optimizers/0/lr"] == 0.1
    ended = summary(folder)
    assert (
        found.summary["final_loss"] == ended["final_loss"] and found.summary["results/score"] == 0.5
    )
    assert all(event["what"] in found.summary["paceline/events"] for event in ended["events"])
    assert any(
        "epoch 1 is over" in str(values.get("paceline/event")) for values in found.history.values()
    )


def test_histograms_and_images(run: Any) -> None:
    folder, found, _ = run
    shown = {step: values for step, values in found.history.items() if "weights/values" in values}
    assert [*shown] == [5, 10]
    assert all(
        sum(values["weights/values"]) == 2 and len(values["weights/bins"]) == 5
        for values in shown.values()
    )
    assert all(
        (each["sample/_type"], each["sample/width"], each["sample/height"]) == ("image-file", 3, 3)
        for each in shown.values()
    )
    assert len(list((folder / "wandb").glob("offline-run-*/files/media/images/sample*.png"))) == 2


def test_without_a_key_it_is_offline_and_that_is_said(
    run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, found, said = run
    (path,) = (folder / "wandb").glob("offline-run-*")
    assert (
        f"wandb: offline, as there is no API key (wandb login): wandb sync {path} sends it later"
        in said
    )
    assert found.id == path.name.rpartition("-")[2]


def test_another_start_is_the_same_run(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    for again, numbers in ((False, (1, 2, 3)), (True, (3, 4))):
        tracker = WandbTracker("")
        tracker.begin_run(TrackedRun("x", tmp_path / "x", "sameid", 0.0, again=again))
        tracker.log_steps([TrackedStep(number, 0.0, {"loss": float(number)}) for number in numbers])
        tracker.close(failed=not again)
        tracker.close(failed=not again)
    found = sorted(offline(tmp_path / "x"), key=lambda each: min(each.history))
    assert [(each.id, [*each.history], each.exit) for each in found] == [
        ("sameid", [1, 2, 3], 1),
        ("sameid", [3, 4], 0),
    ]


def test_the_run_of_a_script_is_left_alone(tmp_path: Path) -> None:
    own = wandb.init(dir=str(tmp_path), mode="offline", settings=wandb.Settings(silent=True))
    try:
        tracker = WandbTracker("")
        tracker.begin_run(TrackedRun("x", tmp_path, "other", 0.0))
        assert wandb.run is own
        wandb.log({"mine": 1.0})
        tracker.log_steps([TrackedStep(7, 0.0, {"loss": 2.0})])
        tracker.close(failed=False)
        assert wandb.run is own
    finally:
        own.finish()
    found = {each.id: each.history for each in offline(tmp_path)}
    assert [*found["other"]] == [7] and [*found[own.id]] == [0]


@pytest.mark.slow
def test_a_server_that_can_not_be_reached_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb.teardown()
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(tracked, "_REACH", 1)
    tracker = WandbTracker("")
    where = tracker.begin_run(TrackedRun("x", tmp_path, "id", 0.0))
    tracker.log_steps([TrackedStep(1, 0.0, {"loss": 2.0})])
    tracker.close(failed=False)
    wandb.teardown()
    assert where.startswith("offline, as the server can't be reached (") and where.endswith(
        "sends it later"
    )
    assert [each.history[1]["loss"] for each in offline(tmp_path)] == [2.0]


def test_a_user_who_has_switched_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "disabled")
    tracker = WandbTracker("")
    assert "WANDB_MODE" in tracker.begin_run(TrackedRun("x", tmp_path, "id", 0.0))
    tracker.log_steps([TrackedStep(1, 0.0, {"loss": 2.0})])
    tracker.close(failed=False)
    wandb.teardown()
    assert not (tmp_path / "wandb").exists() or not list((tmp_path / "wandb").glob("*run-*"))
