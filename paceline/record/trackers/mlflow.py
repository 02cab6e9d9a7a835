"""The MLflow tracker: a run in the store that MLflow itself uses (MLFLOW_TRACKING_URI).

paceline run --report-to mlflow                 experiment from MLFLOW_EXPERIMENT_NAME, or "Default"
paceline run --report-to mlflow:EXPERIMENT
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from paceline.errors import UsageError
from paceline.record.folder import tame
from paceline.record.logged.histogram import HistogramCounts
from paceline.record.logged.media import MediaItem
from paceline.record.trackers.media_folder import file_name
from paceline.record.trackers.tracker import (
    Setting,
    TrackedEnd,
    TrackedEvent,
    TrackedRun,
    TrackedStep,
)

TAG: Final = "paceline.identity"
# Metrics that a store accepts at once.
_MOST: Final = 1000
# Characters of a setting that a store accepts.
_LONGEST: Final = 500


class MlflowTracker:
    """Reports a run to MLflow. `detail` is the name of the experiment."""

    name = "mlflow"

    def __init__(self, detail: str) -> None:
        if "://" in detail:
            raise UsageError(
                f"report_to='mlflow:{detail}': the text behind the colon is the name of an "
                "experiment; give the address of a server "
                f"with export MLFLOW_TRACKING_URI={detail}"
            )
        self._experiment = detail
        self._client: Any = None
        self._id = ""
        self._began = 0.0
        self._events: list[str] = []

    def begin(self, run: TrackedRun) -> str:
        """Begin a run, or continue it.

        Raises:
            ImportError: MLflow isn't installed.
            Exception: Any error of MLflow.
        """
        import mlflow
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME

        self._client, self._began = mlflow.MlflowClient(), run.began
        name = self._experiment or MLFLOW_EXPERIMENT_NAME.get() or "Default"
        known_experiment = self._client.get_experiment_by_name(name)
        experiment = (
            self._client.create_experiment(name)
            if known_experiment is None
            else known_experiment.experiment_id
        )
        # A tag identifies our run, because names in MLflow need not be unique.
        earlier_runs = (
            self._client.search_runs([experiment], f"tags.`{TAG}` = '{run.identity}'")
            if run.again
            else []
        )
        if earlier_runs:
            self._id = earlier_runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._client.create_run(
                experiment, run_name=run.name, tags={TAG: run.identity}
            ).info.run_id
        self._settings(run.settings)
        return f"experiment {name}, run {self._id} in {mlflow.get_tracking_uri()}"

    def steps(self, steps: Sequence[TrackedStep]) -> None:
        """Log the numbers of steps."""
        from mlflow.entities import Metric

        metrics = [
            Metric(metric_name(name), value, round(1000 * (self._began + step.time)), step.step)
            for step in steps
            for name, value in step.scalars().items()
        ]
        # A store refuses larger batches.
        for at in range(0, len(metrics), _MOST):
            self._client.log_batch(self._id, metrics=metrics[at : at + _MOST])

    def media(self, items: Sequence[MediaItem]) -> None:
        """Log images as PNG files, and histograms as JSON."""
        import tempfile
        from pathlib import Path

        for item in items:
            file = Path(f"{file_name(item.name)}-{item.step}")
            if isinstance(item.content, HistogramCounts):
                self._client.log_dict(
                    self._id, tame(item.content.fields()), f"histograms/{file}.json"
                )
                continue
            with tempfile.TemporaryDirectory(prefix="paceline-mlflow-") as folder:
                path = Path(folder, f"{file.name}.png")
                path.write_bytes(item.content.png())
                self._client.log_artifact(self._id, str(path), str(Path("images") / file.parent))

    def event(self, event: TrackedEvent) -> None:
        """Log all events so far as a text."""
        self._events.append(f"{event.time:.1f} s: {event.what}\n")
        self._client.log_text(self._id, "".join(self._events), "events.txt")

    def rewind(self, step: int) -> None:
        """Do nothing, because MLflow shows the last value of a step that is taken again."""

    def conclude(self, end: TrackedEnd) -> None:
        """Log the settings, the results, and the summary file."""
        from mlflow.entities import Metric

        self._settings(end.settings)
        when = round(1000 * (self._began + end.results.get("seconds", 0.0)))
        results = [
            Metric(metric_name(f"summary/{name}"), value, when, 0)
            for name, value in end.results.items()
        ]
        for at in range(0, len(results), _MOST):
            self._client.log_batch(self._id, metrics=results[at : at + _MOST])
        self._client.log_artifact(self._id, str(end.summary))

    def close(self, *, failed: bool) -> None:
        """End the run. Calling it twice is harmless."""
        run_id, self._id = self._id, ""
        if run_id:
            self._client.set_terminated(run_id, "FAILED" if failed else "FINISHED")

    def _settings(self, settings: Mapping[str, Setting]) -> None:
        """Log settings that MLflow doesn't have yet.

        MLflow never changes the value of a setting, so changed settings become tags.
        """
        from mlflow.entities import Param, RunTag

        values = {metric_name(name): str(value)[:_LONGEST] for name, value in settings.items()}
        logged_params = self._client.get_run(self._id).data.params
        new = [Param(name, value) for name, value in values.items() if name not in logged_params]
        changed = [
            RunTag(f"paceline.{name}", value)
            for name, value in values.items()
            if logged_params.get(name, value) != value
        ]
        self._client.log_batch(self._id, params=new, tags=changed)


def metric_name(name: str) -> str:
    """Replace the characters that MLflow doesn't allow in a name by underscores.

    Letters, digits and `_-. :/` are allowed.
    """
    return re.sub(r"[^\w\-. :/]", "_", name)
