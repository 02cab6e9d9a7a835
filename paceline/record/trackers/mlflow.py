"""The MLflow tracker: a run in the store that MLflow itself uses (MLFLOW_TRACKING_URI).

paceline run --report-to mlflow                 experiment from MLFLOW_EXPERIMENT_NAME, or "Default"
paceline run --report-to mlflow:EXPERIMENT
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from paceline.errors import UsageError
from paceline.record.folder import replace_nonfinite
from paceline.record.logged.histogram import HistogramCounts
from paceline.record.logged.media import MediaItem
from paceline.record.trackers.media_folder import media_file_name
from paceline.record.trackers.tracker import (
    Setting,
    TrackedEvent,
    TrackedRun,
    TrackedStep,
    TrackedSummary,
)

IDENTITY_TAG: Final = "paceline.identity"
# Metrics that a store accepts at once.
_MAX_BATCH: Final = 1000
# Characters of a setting that a store accepts.
_MAX_SETTING: Final = 500


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
        self._run_id = ""
        self._began = 0.0
        self._events: list[str] = []

    def begin_run(self, run: TrackedRun) -> str:
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
            self._client.search_runs([experiment], f"tags.`{IDENTITY_TAG}` = '{run.identity}'")
            if run.again
            else []
        )
        if earlier_runs:
            self._run_id = earlier_runs[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            self._run_id = self._client.create_run(
                experiment, run_name=run.name, tags={IDENTITY_TAG: run.identity}
            ).info.run_id
        self._log_settings(run.settings)
        return f"experiment {name}, run {self._run_id} in {mlflow.get_tracking_uri()}"

    def log_steps(self, steps: Sequence[TrackedStep]) -> None:
        """Log the numbers of steps."""
        from mlflow.entities import Metric

        metrics = [
            Metric(
                clean_metric_name(name), value, round(1000 * (self._began + step.time)), step.step
            )
            for step in steps
            for name, value in step.to_scalars().items()
        ]
        # A store refuses larger batches.
        for at in range(0, len(metrics), _MAX_BATCH):
            self._client.log_batch(self._run_id, metrics=metrics[at : at + _MAX_BATCH])

    def log_media(self, items: Sequence[MediaItem]) -> None:
        """Log images as PNG files, and histograms as JSON."""
        import tempfile
        from pathlib import Path

        for item in items:
            file = Path(f"{media_file_name(item.name)}-{item.step}")
            if isinstance(item.content, HistogramCounts):
                self._client.log_dict(
                    self._run_id,
                    replace_nonfinite(item.content.to_fields()),
                    f"histograms/{file}.json",
                )
                continue
            with tempfile.TemporaryDirectory(prefix="paceline-mlflow-") as folder:
                path = Path(folder, f"{file.name}.png")
                path.write_bytes(item.content.to_png())
                self._client.log_artifact(
                    self._run_id, str(path), str(Path("images") / file.parent)
                )

    def log_event(self, event: TrackedEvent) -> None:
        """Log all events so far as a text."""
        self._events.append(f"{event.time:.1f} s: {event.what}\n")
        self._client.log_text(self._run_id, "".join(self._events), "events.txt")

    def rewind_to_step(self, step: int) -> None:
        """Do nothing, because MLflow shows the last value of a step that is taken again."""

    def log_summary(self, end: TrackedSummary) -> None:
        """Log the settings, the results, and the summary file."""
        from mlflow.entities import Metric

        self._log_settings(end.settings)
        when = round(1000 * (self._began + end.results.get("seconds", 0.0)))
        results = [
            Metric(clean_metric_name(f"summary/{name}"), value, when, 0)
            for name, value in end.results.items()
        ]
        for at in range(0, len(results), _MAX_BATCH):
            self._client.log_batch(self._run_id, metrics=results[at : at + _MAX_BATCH])
        self._client.log_artifact(self._run_id, str(end.summary))

    def close(self, *, failed: bool) -> None:
        """End the run. Calling it twice is harmless."""
        run_id, self._run_id = self._run_id, ""
        if run_id:
            self._client.set_terminated(run_id, "FAILED" if failed else "FINISHED")

    def _log_settings(self, settings: Mapping[str, Setting]) -> None:
        """Log settings that MLflow doesn't have yet.

        MLflow never changes the value of a setting, so changed settings become tags.
        """
        from mlflow.entities import Param, RunTag

        values = {
            clean_metric_name(name): str(value)[:_MAX_SETTING] for name, value in settings.items()
        }
        logged_params = self._client.get_run(self._run_id).data.params
        new = [Param(name, value) for name, value in values.items() if name not in logged_params]
        changed = [
            RunTag(f"paceline.{name}", value)
            for name, value in values.items()
            if logged_params.get(name, value) != value
        ]
        self._client.log_batch(self._run_id, params=new, tags=changed)


def clean_metric_name(name: str) -> str:
    """Replace the characters that MLflow doesn't allow in a name by underscores.

    Letters, digits and `_-. :/` are allowed.
    """
    return re.sub(r"[^\w\-. :/]", "_", name)
