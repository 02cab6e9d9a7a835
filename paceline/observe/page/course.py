"""The course of a run for a page: steps, values and workers, in a few hundred stretches each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from paceline.observe.metrics_reader import Floats, MetricsReader, StepColumns, WorkerLook
from paceline.observe.page.decimation import (
    last_values,
    stretch_starts,
    sum_stretches,
    summarize_stretches,
)
from paceline.trace import DESTINATIONS, STEP_PARTS

# Most stretches of the time of single workers.
MAX_LOOKS: Final = 120
MAX_CURVES: Final = 24  # most logged names that have a curve


def summarize_steps(metrics: MetricsReader) -> dict[str, Any]:
    """Return the steps in stretches.

    For each stretch there are the last step and its time, the numbers of steps and samples, and the
    seconds and bytes in all.
    """
    columns = metrics.steps
    begins = stretch_starts(len(columns.step))
    seconds, sent = sum_stretches(columns.seconds, begins), sum_stretches(columns.sent, begins)
    return {
        "step": to_json_numbers(last_values(columns.step, begins)),
        "time": to_json_numbers(last_values(columns.time, begins)),
        "count": np.diff(np.append(begins, len(columns.step))).tolist(),
        "samples": to_json_numbers(sum_stretches(columns.samples, begins)),
        "seconds": {part: to_json_numbers(seconds[:, at]) for at, part in enumerate(STEP_PARTS)},
        "bytes_sent": {to: to_json_numbers(sent[:, at]) for at, to in enumerate(DESTINATIONS)},
    }


def summarize_values(
    metrics: MetricsReader, usual: Mapping[str, float] | None
) -> dict[str, dict[str, Any]]:
    """Return the curves of logged values, `loss` first.

    `usual` has the bytes of a mean step, for a file of metrics that doesn't have those of each
    step.
    """
    curves = {}
    logged = metrics.values
    totals = _cumulate_bytes(metrics.steps, usual)
    # The loss comes first, so it is never among the names that are left out.
    for name in sorted(logged, key=lambda name: (name != "loss", name))[:MAX_CURVES]:
        columns = logged[name]
        begins = stretch_starts(len(columns.step))
        stretch_values = summarize_stretches(columns.value, begins)
        step = last_values(columns.step, begins)
        curves[name] = {
            "step": to_json_numbers(step),
            "time": to_json_numbers(last_values(columns.time, begins)),
            "mean": to_json_numbers(stretch_values.mean),
            "low": to_json_numbers(stretch_values.low),
            "high": to_json_numbers(stretch_values.high),
            "bad": stretch_values.bad.tolist(),
            **{
                to: to_json_numbers(np.interp(step, *totals[to])) if len(totals[to][0]) else []
                for to in DESTINATIONS
            },
        }
    return curves


def _cumulate_bytes(
    columns: StepColumns, usual: Mapping[str, float] | None
) -> dict[str, tuple[Floats, Floats]]:
    """Return the bytes that were sent up to each step."""
    if columns.sent.any() or usual is None:
        return {
            to: (columns.step, columns.sent[:, at].cumsum()) for at, to in enumerate(DESTINATIONS)
        }
    count = np.arange(1.0, len(columns.step) + 1)
    return {to: (columns.step, count * usual[to]) for to in DESTINATIONS}


def summarize_looks(metrics: MetricsReader) -> dict[str, Any]:
    """Summarize single workers over the time of the run.

    For each stretch and worker there is the share of each of PARTS, and the share by which it was
    late.
    """
    all_looks = metrics.looks
    begins = [*stretch_starts(len(all_looks), MAX_LOOKS).tolist(), len(all_looks)]
    pieces = [all_looks[begin:end] for begin, end in pairwise(begins)]
    # Numbers of workers are text in JSON, and are sorted as numbers.
    workers = sorted({name for look in all_looks for name in look.workers}, key=int)
    return {
        "step": [piece[-1].step for piece in pieces],
        "time": [piece[-1].time for piece in pieces],
        "workers": {name: [_worker_shares(piece, name) for piece in pieces] for name in workers},
    }


def _worker_shares(piece: Sequence[WorkerLook], name: str) -> list[float] | None:
    """Return the shares of its time that a worker spent in each of PARTS, and by which it was late.

    None if the worker was absent.
    """
    rows = [look.workers[name] for look in piece if name in look.workers]
    _, *part_seconds, late_seconds = (
        [sum(column) for column in zip(*rows, strict=True)]
        if rows
        else [0.0] * (len(STEP_PARTS) + 2)
    )
    total = sum(part_seconds)
    return (
        [round(value / total, 4) for value in (*part_seconds, late_seconds)] if total > 0 else None
    )


def to_json_numbers(column: Any) -> list[float | None]:
    """Convert a column to JSON: None for NaN and infinities."""
    return [value if math.isfinite(value) else None for value in np.asarray(column).tolist()]
