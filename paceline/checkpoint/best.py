"""Follows the best checkpoint of a run: workers agree on its metric, and the user learns of it.

run.save(metric=loss, best="min")
  every worker       its value, and "min"        -- choose_metric -->  the value of the first worker
                                                                       (all must give the same best)
  the first worker   a manifest with the value   -- catalogue ------>  the best checkpoint, also
                                                                       after losses and resumes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from paceline.checkpoint.files import catalogue
from paceline.checkpoint.files.earlier_best import inherit_best
from paceline.checkpoint.files.manifest import Best, Metric
from paceline.errors import CheckpointError, UsageError
from paceline.formatting import describe_unknown_choice

METRIC_TOLERANCE: Final = 0.01  # relative difference between workers above which they get a warning


def parse_metric(metric: Any, best: Best | None) -> Metric | None:
    """Parse the arguments `metric` and `best` of `run.save`; None if neither was given.

    Raises `UsageError` if only one was given, or if the metric is not one number.
    """
    if metric is None and best is None:
        return None
    if metric is None or best is None:
        lacking = "best='min' or best='max'" if best is None else "metric=a number"
        raise UsageError(
            f"run.save got {'metric' if best is None else 'best'} alone; give {lacking}, too"
        )
    if problem := describe_unknown_choice("best", best, Best):
        raise UsageError(
            f"run.save: {problem}; give 'min' if a smaller metric is better, "
            "'max' if a larger one is"
        )
    if isinstance(metric, Tensor) and (metric.numel() != 1 or metric.is_complex()):
        raise UsageError(
            f"run.save got a metric of shape {tuple(metric.shape)} ({metric.dtype}); "
            "give one number, such as run.mean(loss)"
        )
    value = metric.detach().item() if isinstance(metric, Tensor) else metric
    try:
        # Without this, float() would accept a text such as "1".
        if not hasattr(value, "__float__"):
            raise TypeError
        return Metric(float(value), best)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"run.save got the metric {metric!r} ({type(metric).__qualname__}); give one number"
        ) from error


def choose_metric(metrics: Sequence[Metric | None]) -> tuple[Metric | None, str]:
    """Choose the metric of a checkpoint from the metrics of all workers.

    Args:
        metrics: Metric of each rank.

    Returns:
        The metric of the first worker, and a warning if another worker's differs from it.

    Raises:
        UsageError: Workers gave different arguments.
    """
    first = metrics[0]
    for rank, other in enumerate(metrics):
        if _describe_metric(other) != _describe_metric(first):
            raise UsageError(
                f"workers don't save alike: rank 0 calls run.save({_describe_metric(first)}), rank "
                f"{rank} run.save({_describe_metric(other)}); "
                "call it with the same arguments on all workers"
            )
    if first is None:
        return None, ""
    # Each worker may have the metric of its own share. Warn if they differ by more than a little.
    values = [metric.value for metric in metrics if metric is not None]
    odd_rank = next(
        (rank for rank, value in enumerate(values) if not _is_close(value, first.value)), None
    )
    if odd_rank is None:
        return first, ""
    return first, (
        f"the metric of run.save is {first.value:.6g} on rank 0 and {values[odd_rank]:.6g} on rank "
        f"{odd_rank}: the one of rank 0 counts. Give run.mean(metric) for the mean of all workers"
    )


def _describe_metric(metric: Metric | None) -> str:
    return "" if metric is None else f"metric=..., best={metric.best!r}"


def _is_close(value: float, other: float) -> bool:
    return math.isclose(value, other, rel_tol=METRIC_TOLERANCE) or (
        math.isnan(value) and math.isnan(other)
    )


class BestCheckpoint:
    """Follows which checkpoint of a run is the best, as the manifests in its folder say.

    `announce` is called with a message when there is a new best one.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        # Checkpoints of the run that was resumed, until its best one is taken along.
        self._resumed_folder: Path | None = None
        self._has_warned = False

    def remember_resumed_folder(self, folder: Path) -> None:
        """Remember the folder from which the run resumes. It may have the best checkpoint."""
        self._resumed_folder = folder

    def warn_once(self, warning: str) -> None:
        """Announce that metrics of workers differ, once."""
        if warning and not self._has_warned:
            self._has_warned = True
            self._announce(warning)

    def check_direction(self, folder: Path, metric: Metric | None) -> None:
        """Raise `UsageError` if checkpoints in `folder` were saved with the other `best`."""
        direction = catalogue.find_direction(catalogue.list_entries(folder))
        if metric is not None and direction not in (None, metric.best):
            raise UsageError(
                f"run.save got best={metric.best!r}, and checkpoints in {folder} were saved with "
                f"best={direction!r}: a run has one best checkpoint; "
                "give the same metric each time, and log the others"
            )

    def write_and_announce(
        self, folder: Path, metric: Metric | None, write: Callable[[], Path]
    ) -> Path:
        """Write a checkpoint into `folder`, and announce it if it is the best so far.

        The best checkpoint of the run that was resumed is copied into `folder`, if it is better.
        """
        # `write` may remove the best checkpoint so far, so look it up first.
        ranked_before = catalogue.list_best(folder)
        path = write()
        # At the first checkpoint after a resume: before it, the folder isn't known.
        if self._resumed_folder is not None and self._resumed_folder.resolve() != folder.resolve():
            try:
                inherit_best(folder, self._resumed_folder)
            except CheckpointError as error:
                self._announce(str(error))
        self._resumed_folder = None
        if (
            metric is not None
            and (ranked := catalogue.list_best(folder))
            and ranked[0].path == path
        ):
            for entry in (ranked_before or ranked[1:])[:1]:
                comparison = (
                    ""
                    if entry.metric is None
                    else f", after {entry.metric.value:.6g} at step {entry.step}"
                )
                self._announce(
                    f"step {ranked[0].step} is the best so far: {metric.value:.6g}{comparison}"
                )
        return path

    def summary_facts(self, folder: Path) -> dict[str, Any]:
        """Facts about the best checkpoint in `folder`; empty if none was saved with a metric."""
        ranked = catalogue.list_best(folder)
        if not ranked or ranked[0].metric is None:
            return {}
        best, metric = ranked[0], ranked[0].metric
        return {
            "best": {
                "checkpoint": best.path.name,
                "step": best.step,
                "metric": metric.value,
                "best": metric.best,
            }
        }


def encode_metric(metric: Metric | None) -> list[Any] | None:
    """Encode a metric for a message."""
    return None if metric is None else [metric.best, metric.value]


def decode_metric(fields: list[Any] | None) -> Metric | None:
    """Decode a metric from a message."""
    return None if fields is None else Metric(fields[1], fields[0])
