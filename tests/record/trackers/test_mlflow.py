"""MLflow's store holds what metrics.jsonl has, and another start goes on with the same run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.record.trackers.mlflow import IDENTITY_TAG, MlflowTracker, clean_metric_name
from paceline.record.trackers.tracker import TrackedRun, TrackedStep, TrackedSummary
from tests.harness.runs import workers
from tests.harness.tracked import STEPS, Library, reported, rows, summary, train

mlflow = Library("mlflow")
pytestmark = mlflow.marks
PATCH = pytest.MonkeyPatch()


@pytest.fixture(autouse=True, scope="module")
def _store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with PATCH.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", (tmp_path_factory.mktemp("store") / "files").as_uri())
        # MLflow only maintains it, and wants this said
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
        yield


def runs(experiment: str) -> list[Any]:
    client = mlflow.MlflowClient()
    return list(client.search_runs([client.get_experiment_by_name(experiment).experiment_id]))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, list[str]]:
    said: list[str] = []
    folder = reported(tmp_path_factory.mktemp("run"), [MlflowTracker("circles")], said)
    (found,) = runs("circles")
    return folder, found, said


def test_numbers_are_those_of_the_log(run: Any) -> None:
    folder, found, said = run
    client, history = mlflow.MlflowClient(), dict[int, dict[str, float]]()
    for name in found.data.metrics:
        for metric in (
            client.get_metric_history(found.info.run_id, name)
            if not name.startswith(("paceline/late/", "summary/"))
            else ()
        ):
            history.setdefault(metric.step, {})[name] = metric.value
    assert history == rows(folder)
    assert len(history) == STEPS
    assert any(
        line.startswith(f"mlflow: experiment circles, run {found.info.run_id} in file://")
        for line in said
    )


def test_settings_results_and_events(run: Any) -> None:
    folder, found, _ = run
    ended = summary(folder)
    assert (found.info.run_name, found.info.status, len(found.data.tags[IDENTITY_TAG])) == (
        "test",
        "FINISHED",
        12,
    )
    expected = {
        "sync": "AllReduce()",
        "seed": "1",
        "workers": "2",
        "hosts": "1",
        "loader_workers": "0",
        "shares": "2, 2",
    }
    assert {name: found.data.params[name] for name in expected} == expected
    assert (
        found.data.params["optimizers/0/name"] == "SGD"
        and float(found.data.params["optimizers/0/lr"]) == 0.1
    )
    assert (
        found.data.metrics["summary/final_loss"] == ended["final_loss"]
        and found.data.metrics["summary/results/score"] == 0.5
    )
    kept = Path(found.info.artifact_uri.removeprefix("file://"))
    assert json.loads((kept / "summary.json").read_text()) == ended
    events = (kept / "events.txt").read_text()
    assert [line.split(" s: ", 1)[1] for line in events.splitlines()] == [
        event["what"] for event in ended["events"]
    ]
    assert [path.name for path in sorted((kept / "images").iterdir())] == [
        "sample-10.png",
        "sample-5.png",
    ]
    assert sum(json.loads((kept / "histograms" / "weights-5.json").read_text())["counts"]) == 2


def test_another_start_is_the_same_run(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    for again, size, numbers in ((False, 3, (1, 2, 3)), (True, 2, (3, 4))):
        tracker = MlflowTracker("again")
        tracker.begin_run(
            TrackedRun("x", tmp_path, "same", 0.0, {"workers": size, "sync": "x"}, again)
        )
        tracker.log_steps(
            [TrackedStep(number, 0.0, {"loss@1": float(number + again)}) for number in numbers]
        )
        if again:
            tracker.log_summary(
                TrackedSummary({"workers": size, "shares": "4"}, {}, tmp_path / "summary.json")
            )
        tracker.close(failed=not again)
        tracker.close(failed=not again)
    (found,) = runs("again")
    assert found.info.status == "FINISHED"
    assert (
        found.data.params == {"workers": "3", "sync": "x", "shares": "4"}
        and found.data.tags["paceline.workers"] == "2"
    )
    history = mlflow.MlflowClient().get_metric_history(
        found.info.run_id, clean_metric_name("loss@1")
    )
    assert [(metric.step, metric.value) for metric in history] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (3, 4.0),
        (4, 5.0),
    ]


def test_a_store_that_can_not_be_had_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "false")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "other").as_uri())
    with pytest.raises(
        UsageError,
        match=r"can't be reported to mlflow \(MlflowException: .*MLFLOW_ALLOW_FILE_STORE=true",
    ) as found:
        workers(1, train, folder=tmp_path, trackers=[MlflowTracker("")])
    assert "\n" not in str(found.value)
