"""The available trackers: reads `report_to`, checks that they are installed, and creates them.

"tensorboard,wandb:team/project"
    --parse_trackers-->  (TrackerSpec("tensorboard"), TrackerSpec("wandb", "team/project"))
    --make_trackers-->   trackers
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from paceline.errors import UsageError
from paceline.formatting import format_choices

if TYPE_CHECKING:
    from paceline.record.trackers.tracker import Tracker

# Module that each tracker needs.
REQUIRED_MODULES: Final = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "prometheus": "prometheus_client",
}
NO_TRACKER: Final = "none"


@dataclass(frozen=True)
class TrackerSpec:
    """The name of a tracker, and the text behind its colon."""

    name: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name}:{self.detail}" if self.detail else self.name


def parse_trackers(asked: str | Sequence[str] | None) -> tuple[TrackerSpec, ...]:
    """Parse the option `report_to`.

    Args:
        asked: A name, several names separated by commas, or a list of names. None or "none" means
            no tracker.

    Raises:
        UsageError: A name is unknown or given twice.
    """
    texts = asked.split(",") if isinstance(asked, str) else [] if asked is None else asked
    if not isinstance(texts, list | tuple) or not all(isinstance(word, str) for word in texts):
        raise UsageError(
            f"report_to={asked!r} is neither a name nor a list of names; "
            f"possible are {', '.join(REQUIRED_MODULES)}"
        )
    specs = tuple(TrackerSpec(*map(str.strip, word.split(":", 1))) for word in texts)
    if specs == (TrackerSpec(NO_TRACKER),):
        return ()
    for spec in specs:
        if spec.name not in REQUIRED_MODULES:
            raise UsageError(
                f"report_to={str(spec)!r} is unknown; "
                f"{format_choices(spec.name, list(REQUIRED_MODULES))}"
            )
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise UsageError(
            f"report_to names {Counter(names).most_common(1)[0][0]} twice; "
            "a run goes to each tracker once"
        )
    return specs


def check_trackers_installed(specs: Sequence[TrackerSpec]) -> None:
    """Raise `UsageError` if a module that a tracker needs isn't installed."""
    absent = [
        spec.name for spec in specs if importlib.util.find_spec(REQUIRED_MODULES[spec.name]) is None
    ]
    if absent:
        raise UsageError(
            "report_to needs packages that are not installed: "
            f"pip install 'paceline[{','.join(absent)}]'"
        )


def make_trackers(specs: Sequence[TrackerSpec]) -> list[Tracker]:
    """Create the trackers, which open nothing yet.

    Raises:
        UsageError: The text behind a colon doesn't fit the tracker.
    """
    return [_FACTORIES[spec.name](spec.detail) for spec in specs]


def _make_tensorboard(detail: str) -> Tracker:
    """Create the TensorBoard tracker."""
    from paceline.record.trackers.tensorboard import TensorBoardTracker

    return TensorBoardTracker(detail)


def _make_wandb(detail: str) -> Tracker:
    """Create the W&B tracker."""
    from paceline.record.trackers.wandb import WandbTracker

    return WandbTracker(detail)


def _make_mlflow(detail: str) -> Tracker:
    """Create the MLflow tracker."""
    from paceline.record.trackers.mlflow import MlflowTracker

    return MlflowTracker(detail)


def _make_prometheus(detail: str) -> Tracker:
    """Create the Prometheus tracker."""
    from paceline.record.trackers.prometheus import PrometheusTracker

    return PrometheusTracker(detail)


# The trackers are imported when they are created: the command line needs only their names, and
# should not have to import torch.
_FACTORIES: Final[dict[str, Callable[[str], Any]]] = {
    "tensorboard": _make_tensorboard,
    "wandb": _make_wandb,
    "mlflow": _make_mlflow,
    "prometheus": _make_prometheus,
}
