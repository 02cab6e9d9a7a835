"""The best checkpoint of a run: its metric, on which workers agree, and messages about it.

run.save(metric=loss, best="min")
  every worker     its number, and "min"       -- agreed -->  the number of the first worker; all
                                                              must use the same metric
  the first one    a manifest with the number  -- catalogue -> the best one, whatever was lost or
                                               resumed before
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from paceline.checkpoint.files import catalogue
from paceline.checkpoint.files.earlier_best import inherit
from paceline.checkpoint.files.manifest import Best, Metric
from paceline.errors import CheckpointError, UsageError
from paceline.formatting import unknown

ROUNDING: Final = 0.01  # of a number, by which workers may differ before that is said


def asked(metric: Any, best: Best | None) -> Metric | None:
    """Make of what a script gave to `run.save` what it means.

    Raises `UsageError` for what can't be compared.
    """
    if metric is None and best is None:
        return None
    if metric is None or best is None:
        lacking = (
            "best='min' or best='max', which says what is better"
            if best is None
            else "metric=a number, which is compared"
        )
        raise UsageError(
            f"run.save got {'metric' if best is None else 'best'} alone; give {lacking}, too"
        )
    if wrong := unknown("best", best, Best):
        raise UsageError(
            f"run.save: {wrong}; give 'min' where a smaller metric is better, "
            "'max' where a larger one is"
        )
    if isinstance(metric, Tensor) and (metric.numel() != 1 or metric.is_complex()):
        raise UsageError(
            f"run.save got a metric of shape {tuple(metric.shape)} ({metric.dtype}); "
            "give one number, such as run.mean(loss)"
        )
    plain = metric.detach().item() if isinstance(metric, Tensor) else metric
    try:
        if not hasattr(plain, "__float__"):  # as a text that reads like a number
            raise TypeError
        return Metric(float(plain), best)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"run.save got the metric {metric!r} ({type(metric).__qualname__}); give one number"
        ) from error


def agreed(given: Sequence[Metric | None]) -> tuple[Metric | None, str]:
    """Choose the metric of a checkpoint from those of all workers; also return odd findings in
    words.

    Raises `UsageError` if workers mean different things by it.
    """
    first = given[0]
    for rank, other in enumerate(given):
        if _meaning(other) != _meaning(first):
            raise UsageError(
                f"workers don't save alike: rank 0 calls run.save({_meaning(first)}), rank {rank} "
                f"run.save({_meaning(other)}); call it with the same arguments everywhere"
            )
    if first is None:
        return None, ""
    values = [metric.value for metric in given if metric is not None]
    apart = next(
        (rank for rank, value in enumerate(values) if not _close(value, first.value)), None
    )
    if apart is None:
        return first, ""
    return first, (
        f"the metric of run.save is {first.value:.6g} on rank 0 and {values[apart]:.6g} on rank "
        f"{apart}: the one of rank 0 counts. Give run.mean(metric) for that of all workers"
    )


def _meaning(metric: Metric | None) -> str:
    return "" if metric is None else f"metric=..., best={metric.best!r}"


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=ROUNDING) or (math.isnan(a) and math.isnan(b))


class BestCheckpoint:
    """What the best checkpoint of a run is, as its folder has it.

    `announce` is told when there is a new one.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        # checkpoints of the run that was resumed, whose best is not taken along yet
        self._earlier: Path | None = None
        self._said = False

    def resumed(self, folder: Path) -> None:
        """Remember that the run resumes from `folder`, which may have the best checkpoint so
        far.
        """
        self._earlier = folder

    def doubt(self, odd: str) -> None:
        """Say what is odd about the metrics of the workers, once."""
        if odd and not self._said:
            self._said = True
            self._announce(odd)

    def check(self, folder: Path, metric: Metric | None) -> None:
        """Raise `UsageError` where checkpoints in `folder` were measured in the other direction."""
        known = catalogue.direction(catalogue.entries(folder))
        if metric is not None and known not in (None, metric.best):
            raise UsageError(
                f"run.save got best={metric.best!r}, and checkpoints in {folder} were saved with "
                f"best={known!r}: a run has one best; "
                "give the same metric each time, and log the others"
            )

    def follow(self, folder: Path, metric: Metric | None, write: Callable[[], Path]) -> Path:
        """Write a checkpoint into `folder`, take along an earlier best one, and announce a
        better one.
        """
        before = catalogue.best(folder)
        path = write()
        if self._earlier is not None and self._earlier.resolve() != folder.resolve():
            try:
                inherit(folder, self._earlier)
            except CheckpointError as error:
                self._announce(str(error))
        self._earlier = None
        if metric is not None and (now := catalogue.best(folder)) and now[0].path == path:
            for entry in (before or now[1:])[:1]:  # the best before, which may have gone
                than = (
                    ""
                    if entry.metric is None
                    else f", after {entry.metric.value:.6g} at step {entry.step}"
                )
                self._announce(f"step {now[0].step} is the best so far: {metric.value:.6g}{than}")
        return path

    def facts(self, folder: Path) -> dict[str, Any]:
        """Best checkpoint in `folder`, for the summary; empty if none was saved with a metric."""
        found = catalogue.best(folder)
        if not found or found[0].metric is None:
            return {}
        best, metric = found[0], found[0].metric
        return {
            "best": {
                "checkpoint": best.path.name,
                "step": best.step,
                "metric": metric.value,
                "best": metric.best,
            }
        }


def to_plain(metric: Metric | None) -> list[Any] | None:
    """Put a metric into what travels."""
    return None if metric is None else [metric.best, metric.value]


def from_plain(found: list[Any] | None) -> Metric | None:
    """Make a metric of what has come."""
    return None if found is None else Metric(found[1], found[0])
