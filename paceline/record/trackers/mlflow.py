"""MLflow: a run in the store that MLflow itself would use, which MLFLOW_TRACKING_URI changes.

paceline run --report-to mlflow                 the experiment that MLFLOW_EXPERIMENT_NAME says, or
                                                "Default"
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
_MOST: Final = 1000  # metrics that a store takes at once
_LONGEST: Final = 500  # characters of a setting


class MlflowTracker:
    """Gives a run to MLflow. `detail`: the name of the experiment."""

    name = "mlflow"

    def __init__(self, detail: str) -> None:
        if "://" in detail:
            raise UsageError(
                f"report_to='mlflow:{detail}': behind the colon stands the name of an experiment; "
                "the address of a server is what "
                f"MLFLOW_TRACKING_URI says: export MLFLOW_TRACKING_URI={detail}"
            )
        self._experiment = detail
        self._client: Any = None
        self._id = ""
        self._began = 0.0
        self._events: list[str] = []

    def begin(self, run: TrackedRun) -> str:
        """Begin a run, or go on with it. Raises `ImportError` and MLflow's own errors."""
        import mlflow
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME

        self._client, self._began = mlflow.MlflowClient(), run.began
        name = self._experiment or MLFLOW_EXPERIMENT_NAME.get() or "Default"
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        earlier = (
            self._client.search_runs([experiment], f"tags.`{TAG}` = '{run.identity}'")
            if run.again
            else []
        )
        if earlier:
            self._id = earlier[0].info.run_id
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

        found = [
            Metric(metric_name(name), value, round(1000 * (self._began + each.time)), each.step)
            for each in steps
            for name, value in each.scalars().items()
        ]
        for at in range(0, len(found), _MOST):
            self._client.log_batch(self._id, metrics=found[at : at + _MOST])

    def media(self, items: Sequence[MediaItem]) -> None:
        """Log images as they are, and histograms as JSON."""
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
        """Log what has happened so far as a text."""
        self._events.append(f"{event.time:.1f} s: {event.what}\n")
        self._client.log_text(self._id, "".join(self._events), "events.txt")

    def rewind(self, step: int) -> None:
        """Leave it to MLflow, which keeps all values of a step that is taken again, and shows
        the last.
        """

    def conclude(self, end: TrackedEnd) -> None:
        """Log the settings, the results, and the summary as it is."""
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
        found, self._id = self._id, ""
        if found:
            self._client.set_terminated(found, "FAILED" if failed else "FINISHED")

    def _settings(self, settings: Mapping[str, Setting]) -> None:
        """Log settings that it doesn't have; those that have changed become tags, as MLflow
        keeps the first value of a setting for good.
        """
        from mlflow.entities import Param, RunTag

        given = {metric_name(name): str(value)[:_LONGEST] for name, value in settings.items()}
        there = self._client.get_run(self._id).data.params
        new = [Param(name, value) for name, value in given.items() if name not in there]
        changed = [
            RunTag(f"paceline.{name}", value)
            for name, value in given.items()
            if there.get(name, value) != value
        ]
        self._client.log_batch(self._id, params=new, tags=changed)


def metric_name(name: str) -> str:
    """Return a name as MLflow allows it: other signs than letters, digits and `_-. :/` become
    underscores.
    """
    return re.sub(r"[^\w\-. :/]", "_", name)
