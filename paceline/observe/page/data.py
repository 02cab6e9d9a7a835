"""The data of a page: what it shows of one run, as plain values that JSON takes, small however
long the run was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from paceline.errors import UsageError
from paceline.observe import serving
from paceline.observe.advice import quiet, remarks
from paceline.observe.facts import RunFacts, read, read_fields, so_far
from paceline.observe.metrics import MetricsReader
from paceline.observe.page.course import course, looks, values
from paceline.observe.page.events import kind
from paceline.observe.verdict import verdict
from paceline.record.folder import RunFolder
from paceline.record.pipeline_profile import PipelineProfile
from paceline.trace import PARTS, SENT

SPANS: Final = 3000  # actions of a pipeline that are drawn, at most


def page_data(folder: Path | RunFolder, metrics: MetricsReader | None = None) -> dict[str, Any]:
    """Return what a page shows of the run in `folder`, under way or ended.

    `metrics`: a reader of that run, which goes on where it was. Raises UsageError as
    `paceline.observe.facts.read` does.

    `summary` has the fields of summary.json, or those of them that are known of a run under way,
    which live.json and the metrics tell; all else is made for drawing: `course` and `values` over
    the steps, `looks` of single workers over the time, `events` with their kinds, and among them
    checkpoints, `pipelines` as spans, and texts.
    """
    folder = folder if isinstance(folder, RunFolder) else RunFolder(folder)
    metrics = metrics or MetricsReader(folder)
    facts = read(folder, metrics)
    summary = _summary(folder) if facts.ended else _so_far(folder, facts, metrics)
    advice = remarks(facts)
    return {
        "name": folder.name,
        "ended": facts.ended,
        "standing": facts.standing._asdict(),
        "verdict": verdict(facts),
        "advice": [{**remark._asdict(), "saves": remark.saves} for remark in advice],
        "quiet": "" if advice else quiet(facts),
        "untold": list(facts.untold),
        "served": serving.tell(facts.servers, facts.seconds or 0.0, facts.samples),
        "ranks": [facts.rank(rank) for rank in range(facts.workers)],
        "summary": summary,
        "course": course(metrics),
        "values": values(metrics, facts.bytes_sent),
        "looks": looks(metrics),
        "events": _events(summary),
        "pipelines": [_spans(profile) for profile in facts.pipelines],
    }


def _summary(folder: RunFolder) -> dict[str, Any]:
    """Return the fields of the summary, which was read before, as strict JSON has them."""
    try:
        found: dict[str, Any] = plain(read_fields(folder.summary))
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder.summary} can't be read any more ({error})") from error
    return found


def _so_far(folder: RunFolder, facts: RunFacts, metrics: MetricsReader) -> dict[str, Any]:
    """Return the fields that are known of a run under way: what it tells of itself, and of its
    steps what the metrics have.
    """
    inside = facts.step * facts.steps
    fields = {
        "steps": facts.steps,
        "samples": facts.samples,
        "seconds": facts.seconds,
        "samples_per_second": facts.samples / inside if inside > 0 else None,
        "final_loss": facts.final_loss,
        "step_seconds": {part: facts.step_seconds[part] for part in PARTS},
    }
    if facts.steps:
        fields["bytes_sent"] = dict(
            zip(SENT, metrics.steps.sent.mean(axis=0).tolist(), strict=True)
        )
    found: dict[str, Any] = plain({**so_far(folder), **fields})
    return found


def _events(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a run and its checkpoints, each with its kind, in the order of their
    times.
    """
    events = [{**event, "kind": kind(event)} for event in summary.get("events") or ()]
    saves = [{**save, "kind": "checkpoint"} for save in summary.get("saves") or ()]
    return sorted([*events, *saves], key=lambda event: float(event["time"]))


def plain(value: Any) -> Any:
    """Return a value as strict JSON takes it: numbers that are none become their names."""
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def _spans(profile: PipelineProfile) -> dict[str, Any]:
    """Return the schedule of a pipeline with the times measured: for each worker [kind, stage,
    micro-batch, start, end] of its actions.
    """
    timeline = profile.timeline
    rows = [
        [[s.action.kind, s.action.stage, s.action.micro_batch, s.start, s.end] for s in row]
        for row in timeline.rows
    ]
    small = sum(map(len, rows)) <= SPANS
    return {
        "schedule": profile.schedule,
        "micro_batches": profile.micro_batches,
        "ranks": list(profile.ranks),
        "seconds": timeline.makespan,
        "rows": rows if small else [],
    }
