"""The course of a run for a page: steps, values and workers, in a few hundred stretches each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from paceline.observe.metrics import Floats, Look, MetricsReader, StepColumns
from paceline.observe.page.decimation import lasts, starts, stretches, sums
from paceline.trace import PARTS, SENT

# Most stretches of the time of single workers.
LOOKS: Final = 120
NAMES: Final = 24  # most logged names that have a curve


def course(metrics: MetricsReader) -> dict[str, Any]:
    """Return the steps in stretches.

    For each stretch there are the last step and its time, the numbers of steps and samples, and the
    seconds and bytes in all.
    """
    columns = metrics.steps
    begins = starts(len(columns.step))
    seconds, sent = sums(columns.seconds, begins), sums(columns.sent, begins)
    return {
        "step": numbers(lasts(columns.step, begins)),
        "time": numbers(lasts(columns.time, begins)),
        "count": np.diff(np.append(begins, len(columns.step))).tolist(),
        "samples": numbers(sums(columns.samples, begins)),
        "seconds": {part: numbers(seconds[:, at]) for at, part in enumerate(PARTS)},
        "bytes_sent": {to: numbers(sent[:, at]) for at, to in enumerate(SENT)},
    }


def values(metrics: MetricsReader, usual: Mapping[str, float] | None) -> dict[str, dict[str, Any]]:
    """Return the curves of logged values, `loss` first.

    `usual` has the bytes of a mean step, for a file of metrics that doesn't have those of each
    step.
    """
    curves = {}
    logged = metrics.values
    totals = _totals(metrics.steps, usual)
    # The loss comes first, so it is never among the names that are left out.
    for name in sorted(logged, key=lambda name: (name != "loss", name))[:NAMES]:
        columns = logged[name]
        begins = starts(len(columns.step))
        stretch_values = stretches(columns.value, begins)
        step = lasts(columns.step, begins)
        curves[name] = {
            "step": numbers(step),
            "time": numbers(lasts(columns.time, begins)),
            "mean": numbers(stretch_values.mean),
            "low": numbers(stretch_values.low),
            "high": numbers(stretch_values.high),
            "bad": stretch_values.bad.tolist(),
            **{
                to: numbers(np.interp(step, *totals[to])) if len(totals[to][0]) else []
                for to in SENT
            },
        }
    return curves


def _totals(
    columns: StepColumns, usual: Mapping[str, float] | None
) -> dict[str, tuple[Floats, Floats]]:
    """Return the bytes that were sent up to each step."""
    if columns.sent.any() or usual is None:
        return {to: (columns.step, columns.sent[:, at].cumsum()) for at, to in enumerate(SENT)}
    count = np.arange(1.0, len(columns.step) + 1)
    return {to: (columns.step, count * usual[to]) for to in SENT}


def looks(metrics: MetricsReader) -> dict[str, Any]:
    """Return what single workers did over the time of the run.

    For each stretch and worker there is the share of each of PARTS, and the share by which it was
    late.
    """
    all_looks = metrics.looks
    begins = [*starts(len(all_looks), LOOKS).tolist(), len(all_looks)]
    pieces = [all_looks[begin:end] for begin, end in pairwise(begins)]
    # Numbers of workers are text in JSON, and are sorted as numbers.
    workers = sorted({name for look in all_looks for name in look.workers}, key=int)
    return {
        "step": [piece[-1].step for piece in pieces],
        "time": [piece[-1].time for piece in pieces],
        "workers": {name: [_share(piece, name) for piece in pieces] for name in workers},
    }


def _share(piece: Sequence[Look], name: str) -> list[float] | None:
    """Return the shares of its time that a worker spent in each of PARTS, and by which it was late.

    None if the worker was absent.
    """
    rows = [look.workers[name] for look in piece if name in look.workers]
    _, *part_seconds, late_seconds = (
        [sum(column) for column in zip(*rows, strict=True)] if rows else [0.0] * (len(PARTS) + 2)
    )
    total = sum(part_seconds)
    return (
        [round(value / total, 4) for value in (*part_seconds, late_seconds)] if total > 0 else None
    )


def numbers(column: Any) -> list[float | None]:
    """Convert a column to JSON: None for NaN and infinities."""
    return [value if math.isfinite(value) else None for value in np.asarray(column).tolist()]
