"""Makes the data of a page: plain values for JSON, small however long the run was."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from paceline.errors import UsageError
from paceline.observe import server_report
from paceline.observe.advice import collect_remarks, explain_no_advice
from paceline.observe.facts import RunFacts, read_facts, read_fields, read_live_fields
from paceline.observe.metrics_reader import MetricsReader
from paceline.observe.page.course import summarize_looks, summarize_steps, summarize_values
from paceline.observe.page.events import classify_event
from paceline.observe.verdict import make_verdict
from paceline.record.folder import RunFolder
from paceline.record.pipeline_profile import PipelineProfile
from paceline.trace import DESTINATIONS, STEP_PARTS

# Most actions of a pipeline that are drawn.
MAX_SPANS: Final = 3000


def make_page_data(
    folder: Path | RunFolder, metrics: MetricsReader | None = None
) -> dict[str, Any]:
    """Make the data that a page shows of a run, which may be under way.

    `summary` has the fields of summary.json. If the run is under way, they come from live.json and
    the metrics, as far as they are known. Everything else is made for drawing: `course` and
    `values` over the steps, `looks` of single workers over the time, `events` and checkpoints with
    their kinds, `pipelines` as spans, and texts.

    Args:
        folder: Folder of the run.
        metrics: Reader of the run's metrics, which continues where it was. Default: a new one.

    Raises:
        UsageError: As `paceline.observe.facts.read_facts`.
    """
    folder = folder if isinstance(folder, RunFolder) else RunFolder(folder)
    metrics = metrics or MetricsReader(folder)
    facts = read_facts(folder, metrics)
    summary = _read_summary(folder) if facts.ended else _read_so_far(folder, facts, metrics)
    advice = collect_remarks(facts)
    return {
        "name": folder.name,
        "ended": facts.ended,
        "standing": facts.standing._asdict(),
        "verdict": make_verdict(facts),
        "advice": [{**remark._asdict(), "saves": remark.saving_in_words} for remark in advice],
        "quiet": "" if advice else explain_no_advice(facts),
        "untold": list(facts.untold),
        "served": server_report.describe_servers(
            facts.servers, facts.seconds or 0.0, facts.samples
        ),
        "ranks": [facts.name_rank(rank) for rank in range(facts.workers)],
        "summary": summary,
        "course": summarize_steps(metrics),
        "values": summarize_values(metrics, facts.bytes_sent),
        "looks": summarize_looks(metrics),
        "events": _list_events(summary),
        "pipelines": [_make_spans(profile) for profile in facts.pipelines],
    }


def _read_summary(folder: RunFolder) -> dict[str, Any]:
    """Return the fields of the summary as strict JSON. The summary was checked before."""
    try:
        fields: dict[str, Any] = to_strict_values(read_fields(folder.summary))
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder.summary} can no longer be read ({error})") from error
    return fields


def _read_so_far(folder: RunFolder, facts: RunFacts, metrics: MetricsReader) -> dict[str, Any]:
    """Return the fields that are known of a run under way, from live.json and the metrics."""
    seconds_in_steps = facts.mean_step_seconds * facts.steps
    fields = {
        "steps": facts.steps,
        "samples": facts.samples,
        "seconds": facts.seconds,
        "samples_per_second": facts.samples / seconds_in_steps if seconds_in_steps > 0 else None,
        "final_loss": facts.final_loss,
        "step_seconds": {part: facts.step_seconds[part] for part in STEP_PARTS},
    }
    # The summary has the bytes of a mean step. Until there is one, the metrics give them.
    if facts.steps:
        fields["bytes_sent"] = dict(
            zip(DESTINATIONS, metrics.steps.sent.mean(axis=0).tolist(), strict=True)
        )
    known_fields: dict[str, Any] = to_strict_values({**read_live_fields(folder), **fields})
    return known_fields


def _list_events(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the events and checkpoints of a run with their kinds, in order of time."""
    events = [{**event, "kind": classify_event(event)} for event in summary.get("events") or ()]
    saves = [{**save, "kind": "checkpoint"} for save in summary.get("saves") or ()]
    return sorted([*events, *saves], key=lambda event: float(event["time"]))


def to_strict_values(value: Any) -> Any:
    """Convert a value to strict JSON. NaN and infinities become their names."""
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {str(key): to_strict_values(each) for key, each in value.items()}
    return [to_strict_values(each) for each in value] if isinstance(value, list | tuple) else value


def _make_spans(profile: PipelineProfile) -> dict[str, Any]:
    """Return the schedule of a pipeline with the measured times.

    Each worker has a row of actions: [kind, stage, micro-batch, start, end].
    """
    timeline = profile.simulated_timeline
    rows = [
        [
            [span.action.kind, span.action.stage, span.action.micro_batch, span.start, span.end]
            for span in row
        ]
        for row in timeline.rows
    ]
    # A pipeline with very many actions would make the page large, and its boxes invisible.
    fits = sum(map(len, rows)) <= MAX_SPANS
    return {
        "schedule": profile.schedule,
        "micro_batches": profile.micro_batches,
        "ranks": list(profile.ranks),
        "seconds": timeline.makespan,
        "rows": rows if fits else [],
    }
