"""The course of a run: its steps, what was logged and what single workers did, in a few hundred
stretches each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from paceline.observe.metrics import Floats, Look, MetricsReader, StepColumns
from paceline.observe.page.decimation import lasts, starts, stretches, sums
from paceline.trace import PARTS, SENT

LOOKS: Final = 120  # stretches of the time of single workers
NAMES: Final = 24  # logged names that have a curve, at most; all others are named


def course(metrics: MetricsReader) -> dict[str, Any]:
    """Return the steps in stretches: the last step and second of each, how many steps and
    samples it has, and in all seconds and bytes.
    """
    columns = metrics.steps
    begins = starts(len(columns.step))
    spent, sent = sums(columns.seconds, begins), sums(columns.sent, begins)
    return {
        "step": numbers(lasts(columns.step, begins)),
        "time": numbers(lasts(columns.time, begins)),
        "count": np.diff(np.append(begins, len(columns.step))).tolist(),
        "samples": numbers(sums(columns.samples, begins)),
        "seconds": {part: numbers(spent[:, at]) for at, part in enumerate(PARTS)},
        "bytes_sent": {to: numbers(sent[:, at]) for at, to in enumerate(SENT)},
    }


def values(metrics: MetricsReader, usual: Mapping[str, float] | None) -> dict[str, dict[str, Any]]:
    """Return the curves of what was logged, `loss` first.

    `usual`: the bytes of a mean step, where those of each one aren't known.
    """
    found = {}
    logged = metrics.values
    totals = _totals(metrics.steps, usual)
    for name in sorted(logged, key=lambda name: (name != "loss", name))[:NAMES]:
        columns = logged[name]
        begins = starts(len(columns.step))
        each = stretches(columns.value, begins)
        step = lasts(columns.step, begins)
        found[name] = {
            "step": numbers(step),
            "time": numbers(lasts(columns.time, begins)),
            "mean": numbers(each.mean),
            "low": numbers(each.low),
            "high": numbers(each.high),
            "bad": each.bad.tolist(),
            **{
                to: numbers(np.interp(step, *totals[to])) if len(totals[to][0]) else []
                for to in SENT
            },
        }
    return found


def _totals(
    columns: StepColumns, usual: Mapping[str, float] | None
) -> dict[str, tuple[Floats, Floats]]:
    """Return the bytes that were sent up to each step."""
    if columns.sent.any() or usual is None:
        return {to: (columns.step, columns.sent[:, at].cumsum()) for at, to in enumerate(SENT)}
    count = np.arange(1.0, len(columns.step) + 1)
    return {to: (columns.step, count * usual[to]) for to in SENT}


def looks(metrics: MetricsReader) -> dict[str, Any]:
    """Return what single workers did over the time: the part of each stretch that each spent by
    parts, and by which it was late.
    """
    found = metrics.looks
    begins = [*starts(len(found), LOOKS).tolist(), len(found)]
    pieces = [found[begin:end] for begin, end in pairwise(begins)]
    names = sorted({name for look in found for name in look.workers}, key=int)
    return {
        "step": [piece[-1].step for piece in pieces],
        "time": [piece[-1].time for piece in pieces],
        "workers": {name: [_share(piece, name) for piece in pieces] for name in names},
    }


def _share(piece: Sequence[Look], name: str) -> list[float] | None:
    """Return the parts of its time that a worker spent, as PARTS are, and by which it was late;
    None where it wasn't there.
    """
    rows = [look.workers[name] for look in piece if name in look.workers]
    _, *spent, late = (
        [sum(column) for column in zip(*rows, strict=True)] if rows else [0.0] * (len(PARTS) + 2)
    )
    whole = sum(spent)
    return [round(value / whole, 4) for value in (*spent, late)] if whole > 0 else None


def numbers(column: Any) -> list[float | None]:
    """Return a column as JSON takes it: None for what is no number."""
    return [value if math.isfinite(value) else None for value in np.asarray(column).tolist()]
