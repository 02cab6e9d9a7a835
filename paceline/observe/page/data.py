"""The data of a page: what it shows of one run, as plain values that JSON takes, small however long the run was."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from paceline.observe.facts import read
from paceline.observe.metrics import MetricsReader
from paceline.observe.page.decimation import lasts, starts, stretches, sums
from paceline.session.record.folder import PARTS, RunFolder


def page_data(folder: Path | RunFolder, metrics: MetricsReader | None = None) -> dict[str, Any]:
    """Return what a page shows of the run in `folder`, under way or ended.

    `metrics`: a reader of that run, which goes on where it was. Raises UsageError as `paceline.observe.facts.read` does.
    """
    folder = folder if isinstance(folder, RunFolder) else RunFolder(folder)
    facts = read(folder)
    metrics = metrics or MetricsReader(folder)
    metrics.read()
    return {
        "name": folder.name,
        "ended": facts.ended,
        "steps": facts.steps,
        "samples": facts.samples,
        "seconds": _plain(facts.seconds),
        "sync": facts.sync,
        "workers": facts.workers,
        "hosts": facts.hosts,
        "step_seconds": facts.step_seconds,
        "course": _course(metrics),
        "values": _values(metrics),
        "events": [dict(event) for event in facts.events],
    }


def _course(metrics: MetricsReader) -> dict[str, Any]:
    """Return the steps in stretches: the last step and second of each, how many steps and samples it has, and seconds of parts in all."""
    columns = metrics.steps
    begins = starts(len(columns.step))
    spent = sums(columns.seconds, begins)
    return {
        "step": _list(lasts(columns.step, begins)),
        "time": _list(lasts(columns.time, begins)),
        "count": np.diff(np.append(begins, len(columns.step))).tolist(),
        "samples": _list(sums(columns.samples, begins)),
        "seconds": {part: _list(spent[:, at]) for at, part in enumerate(PARTS)},
    }


def _values(metrics: MetricsReader) -> dict[str, dict[str, list[float | None]]]:
    found = {}
    for name, columns in sorted(metrics.values.items(), key=lambda item: (item[0] != "loss", item[0])):
        begins = starts(len(columns.step))
        each = stretches(columns.value, begins)
        found[name] = {
            "step": _list(lasts(columns.step, begins)),
            "time": _list(lasts(columns.time, begins)),
            "mean": _list(each.mean),
            "low": _list(each.low),
            "high": _list(each.high),
            "bad": _list(each.bad),
        }
    return found


def _list(values: Any) -> list[float | None]:
    return [_plain(value) for value in np.asarray(values).tolist()]


def _plain(value: float | None) -> float | None:
    """Return what JSON takes: None for what is no number."""
    return None if value is None or not math.isfinite(value) else value
