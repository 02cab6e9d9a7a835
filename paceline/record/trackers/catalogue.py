"""The trackers that there are: what `report_to` asks for, whether it is installed, and the objects
that it stands for.

"tensorboard,wandb:team/project"  --read-->  (TrackerSpec("tensorboard"), TrackerSpec("wandb",
                                             "team/project"))  --make-->  trackers
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from paceline.errors import UsageError
from paceline.formatting import choices

if TYPE_CHECKING:
    from paceline.record.trackers.tracker import Tracker

# tracker: module
NEEDS: Final = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "prometheus": "prometheus_client",
}
NOWHERE: Final = "none"


@dataclass(frozen=True)
class TrackerSpec:
    """A tracker as it was asked for: its name, and what stands behind the colon."""

    name: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name}:{self.detail}" if self.detail else self.name


def read(asked: str | Sequence[str] | None) -> tuple[TrackerSpec, ...]:
    """Read what `report_to` was given: a name, several with commas between them, or a list;
    "none" for nowhere. Raises `UsageError`.
    """
    words = asked.split(",") if isinstance(asked, str) else [] if asked is None else asked
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise UsageError(
            f"report_to={asked!r} is no name and no list of names; possible are {', '.join(NEEDS)}"
        )
    specs = tuple(TrackerSpec(*map(str.strip, word.split(":", 1))) for word in words)
    if specs == (TrackerSpec(NOWHERE),):
        return ()
    for spec in specs:
        if spec.name not in NEEDS:
            raise UsageError(
                f"report_to={str(spec)!r} is unknown; {choices(spec.name, list(NEEDS))}"
            )
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise UsageError(
            f"report_to names {Counter(names).most_common(1)[0][0]} twice; "
            "a run goes to each tracker once"
        )
    return specs


def check_installed(specs: Sequence[TrackerSpec]) -> None:
    """Raise `UsageError` if what a tracker needs isn't installed here."""
    absent = [spec.name for spec in specs if importlib.util.find_spec(NEEDS[spec.name]) is None]
    if absent:
        raise UsageError(
            f"report_to needs what isn't installed: pip install 'paceline[{','.join(absent)}]'"
        )


def make(specs: Sequence[TrackerSpec]) -> list[Tracker]:
    """Make the trackers, which open nothing yet.

    Raises `UsageError` for details that one can't have.
    """
    return [_KINDS[spec.name](spec.detail) for spec in specs]


def _tensorboard(detail: str) -> Tracker:
    from paceline.record.trackers.tensorboard import TensorBoardTracker

    return TensorBoardTracker(detail)


def _wandb(detail: str) -> Tracker:
    from paceline.record.trackers.wandb import WandbTracker

    return WandbTracker(detail)


def _mlflow(detail: str) -> Tracker:
    from paceline.record.trackers.mlflow import MlflowTracker

    return MlflowTracker(detail)


def _prometheus(detail: str) -> Tracker:
    from paceline.record.trackers.prometheus import PrometheusTracker

    return PrometheusTracker(detail)


# here as functions: the command line asks for names alone, and needs no torch
_KINDS: Final[dict[str, Callable[[str], Any]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "prometheus": _prometheus,
}
